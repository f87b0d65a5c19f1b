"""The chat page in a browser that nobody sees."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
PAGE = Path(__file__).parents[2] / "mlx_spec" / "server" / "chat.html"
WAIT = 30_000  # milliseconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs `pip install playwright`")
    if BROWSER is None:
        pytest.skip("needs Chromium, as of `apt-get install chromium`")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    """The page, ready; at the end nothing was wrong in it."""
    opened = browser.new_page()
    opened.set_default_timeout(WAIT)
    errors: list[Any] = []
    opened.on("pageerror", lambda error: errors.append(error))
    opened.goto(served.url)
    opened.wait_for_selector("#state.ready")
    opened.click("#settings")
    opened.fill("#max_tokens", "24")
    opened.fill("#num_draft_tokens", "3")
    yield opened
    opened.close()
    assert not errors


def ask(page: Any, text: str) -> str:
    """Send a message, and return the reply when it is complete."""
    page.fill("#message", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant:last-child .tools")
    return str(page.text_content(".assistant:last-child > .text"))


def test_a_chat_of_two_turns(page: Any, client: Any) -> None:
    """The replies are those of the interface; drafted tokens are marked, and the figures are there."""
    first = ask(page, "The target ")
    messages: list[Any] = [{"role": "user", "content": "The target"}]
    expected = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24)
    assert first == expected.choices[0].message.content
    drafted = page.eval_on_selector_all(".drafted", "spans => spans.map(span => span.textContent).join('')")
    assert 0 < len(drafted) < len(expected.choices[0].message.content)
    shown = page.inner_text(".assistant .figures")
    assert (
        "24 tokens" in shown and "tokens a round" in shown and "tokens/s" in shown and "cut at the limit" in shown
    )
    second = ask(page, "And?")
    messages += [{"role": "assistant", "content": expected.choices[0].message.content}]
    messages += [{"role": "user", "content": "And?"}]
    expected = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24)
    assert second == expected.choices[0].message.content
    page.click("#tint")
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.drafted')).backgroundColor") == "rgba(0, 0, 0, 0)"
    )


def test_edit_and_regenerate(page: Any, client: Any) -> None:
    first = ask(page, "The target ")
    page.click("text=Regenerate")
    page.wait_for_selector(".assistant .tools")
    assert page.text_content(".assistant > .text") == first
    ask(page, "And?")
    page.click(".user >> nth=0 >> text=Edit")
    page.fill(".user textarea", "Each row of")
    page.click(".user >> text=Send")
    page.wait_for_selector(".assistant .tools")
    assert page.locator(".turn").count() == 2
    messages: Any = [{"role": "user", "content": "Each row of"}]
    expected = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24)
    assert page.inner_text(".user .text") == "Each row of"
    assert page.text_content(".assistant > .text") == expected.choices[0].message.content


def test_stop(page: Any, served: Served) -> None:
    page.fill("#max_tokens", "5000")
    page.fill("#message", "The target ")
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant > .text span")
    page.click("#stop")
    page.wait_for_selector(".assistant .tools")
    assert "stopped" in page.inner_text(".assistant .figures")
    served.wait_until_idle()
    assert page.inner_text(".assistant > .text")


def test_an_error_is_shown(page: Any) -> None:
    page.fill("#temperature", "5")
    page.fill("#message", "The target ")
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant .error")
    assert "temperature" in page.inner_text(".assistant .error")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(page: Any, scheme: str) -> None:
    """Text stands out from its ground in both, marked or not."""
    page.emulate_media(color_scheme=scheme)
    ask(page, "The target ")
    colours = page.evaluate(
        """() => [[document.body, 'color'], [document.body, 'backgroundColor'],
        [document.querySelector('.drafted'), 'backgroundColor']]
        .map(([element, name]) => getComputedStyle(element)[name].match(/[0-9.]+/g).slice(0, 3).map(Number))"""
    )
    ink, paper, marked = (luminance(colour) for colour in colours)
    assert (paper > ink) == (scheme == "light")
    for ground in (paper, marked):
        assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) > 7


def luminance(colour: list[float]) -> float:
    """Return how light a colour is, as WCAG defines it."""
    linear = [c / 255 / 12.92 if c <= 10.3 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = PAGE.read_text()
    assert "http://" not in text and "https://" not in text and "src=" not in text and "@import" not in text
