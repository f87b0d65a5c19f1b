"""Every command of tools says in its help what it does and whether it needs a GPU."""

import importlib
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
COMMANDS = [path.stem for path in sorted(TOOLS.glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str) -> None:
    parser = importlib.import_module(f"tools.{name}").setup_arg_parser()
    text = " ".join(parser.format_help().split())
    assert text.startswith(f"usage: python -m tools.{name} ")
    assert "GPU" in (parser.description or "")
    assert all(action.help for action in parser._actions)


def test_the_help_of_writing_replies_names_the_time_limit() -> None:
    parser = importlib.import_module("tools.write_replies").setup_arg_parser()
    assert "--time-limit" in parser.format_help() and "SIGTERM" in parser.format_help()
