"""README and docs: Python blocks run and print what they say, links lead somewhere, commands take their flags."""

import contextlib
import io
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

import mlx_spec.errors

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
COMMAND = re.compile(r"python -m (mlx_spec|tools)\.(\w+)((?:[^\n`]*\\\n)*[^\n`|]*)")


def page_names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Return (language, text, output) of a page's blocks; the output of Python is a text block right after it."""
    found = list(BLOCK.finditer(page.read_text()))
    after = {match.end(): following for match, following in zip(found, found[1:], strict=False)}
    result = []
    for match in found:
        following = after.get(match.end())
        is_output = (
            following is not None
            and following[1] == "text"
            and not page.read_text()[match.end() : following.start()].strip()
        )
        result.append((match[1], match[2], following[2] if following is not None and is_output else ""))
    return result


PYTHON_PAGES = [page for page in PAGES if any(language == "python" for language, _, _ in blocks(page))]


@pytest.mark.real_model
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=page_names(PYTHON_PAGES))
def test_python_blocks_run_and_print_what_the_page_says(page: Path) -> None:
    """Top to bottom in one namespace, as a reader would type them."""
    namespace: dict[str, object] = {"__name__": "page"}
    for language, text, expected in blocks(page):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(text, str(page), "exec"), namespace)
            if expected:
                assert printed.getvalue().strip() == expected.strip()


@pytest.mark.parametrize("page", PAGES, ids=page_names(PAGES))
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for target, heading in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" in target:
            continue
        file = page if not target else (page.parent / target).resolve()
        assert file.exists(), f"{page.name} links to {target}"
        if heading:
            lines = re.findall(r"^#+ (.*)$", BLOCK.sub("", file.read_text()), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines]
            assert heading in anchors, f"{page.name} links to {target}#{heading}"


@pytest.mark.parametrize("page", PAGES, ids=page_names(PAGES))
def test_commands_exist_and_take_their_flags(page: Path) -> None:
    for package, name, arguments in COMMAND.findall(page.read_text()):
        module = f"mlx_spec.cli.{name}" if package == "mlx_spec" else f"tools.{name}"
        parser = import_module(module).setup_arg_parser()
        known = {option for action in parser._actions for option in action.option_strings}
        words = shlex.split(arguments.replace("\\\n", " "), comments=True)
        flags = [word.split("=")[0] for word in words if re.fullmatch(r"--?[a-zA-Z][\w-]*(=.*)?", word)]
        assert set(flags) <= known, f"{page.name}: python -m {package}.{name} has no {set(flags) - known}"


def test_the_page_for_apps_shows_all_errors() -> None:
    tree = [line for line in str(mlx_spec.errors.__doc__).splitlines() if line.startswith(("├", "│", "└"))]
    page = (ROOT / "docs" / "in-an-app.md").read_text()
    assert tree and all(line in page for line in tree)


@pytest.mark.parametrize("page", PAGES, ids=page_names(PAGES))
def test_pages_speak_of_the_project_alone(page: Path) -> None:
    assert not re.search(r"\bshared/|/work/|\bissue #?\d+", page.read_text())
