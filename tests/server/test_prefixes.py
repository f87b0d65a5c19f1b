"""Prompts that begin as earlier ones did: what is read again, what is kept, and that no text shows it."""

import threading
from typing import Any

import openai
import pytest
from served import Served

from mlx_spec import load
from mlx_spec.engine import Engine, Request
from mlx_spec.engine.prompt import common_length
from mlx_spec.generate import chat_prompt
from mlx_spec.server.prefix_store import PrefixStore

STEP = 512
SYSTEM = {"role": "system", "content": "def forward(self, tokens): return " * 40}
OPTIONS: dict[str, Any] = {"model": "tiny", "max_tokens": 16}


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> tuple[str, int, int]:
    """Return a reply, its prompt's tokens, and how many of them were cached."""
    reply = client.chat.completions.create(**{**OPTIONS, **options}, messages=messages)
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    cached = reply.usage.prompt_tokens_details.cached_tokens
    return reply.choices[0].message.content or "", reply.usage.prompt_tokens, cached or 0


def clear(served: Served) -> None:
    served.wait_until_idle()
    assert served.worker._store is not None
    served.worker._store.clear()


def conversation(client: openai.OpenAI, turns: int) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the replies of a conversation, and the prompt tokens of each turn with those that were cached."""
    messages: list[Any] = [SYSTEM]
    replies, counts = [], []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"And {turn}? " + "x y z " * 60})
        reply, tokens, cached = ask(client, messages, seed=1, temperature=0.8)
        messages.append({"role": "assistant", "content": reply})
        replies.append(reply)
        counts.append((tokens, cached))
    return replies, counts


def test_a_turn_reads_what_is_new(client: openai.OpenAI, served: Served) -> None:
    """All whole chunks of the turn before are cached; cold, the text is the same."""
    clear(served)
    warm, counts = conversation(client, 3)
    assert counts[0][1] == 0
    for (before, _), (_, cached) in zip(counts, counts[1:], strict=False):
        assert cached == (before - 1) // STEP * STEP > 0
    messages: list[Any] = [SYSTEM]
    for turn, text in enumerate(warm):
        messages.append({"role": "user", "content": f"And {turn}? " + "x y z " * 60})
        clear(served)
        assert ask(client, messages, seed=1, temperature=0.8)[0] == text
        messages.append({"role": "assistant", "content": text})


def test_an_edited_turn_shares_what_comes_before(client: openai.OpenAI, served: Served) -> None:
    clear(served)
    chats = [[SYSTEM, {"role": "user", "content": "a " * 100 + rest * 300}] for rest in ("a ", "b ")]
    same = common_length(*(chat_prompt(served.tokenizer, chat) for chat in chats))
    ask(client, chats[0])
    assert ask(client, chats[1])[2] == same // STEP * STEP > 0


def test_a_side_request_takes_nothing_away(client: openai.OpenAI, served: Served) -> None:
    clear(served)
    messages: list[Any] = [SYSTEM, {"role": "user", "content": "a " * 300}]
    ask(client, messages)
    for number in range(5):
        ask(client, [{"role": "user", "content": f"A title, please: {number}"}])
    assert ask(client, messages)[2] >= 2 * STEP


def test_requests_at_once_share_a_prompt_that_is_read(client: openai.OpenAI, served: Served) -> None:
    clear(served)
    messages: list[Any] = [SYSTEM, {"role": "user", "content": "a " * 300}]
    with client.chat.completions.create(
        **{**OPTIONS, "max_tokens": 1500}, messages=messages, stream=True
    ) as first:
        assert any(chunk.choices[0].delta.content for chunk in first)
        assert ask(client, messages)[2] >= 2 * STEP


def test_texts_of_one_prompt_share_it(client: openai.OpenAI, served: Served) -> None:
    """Its pages are taken once, and all texts begin at their prompt's end."""
    clear(served)
    options: Any = {**OPTIONS, "messages": [SYSTEM], "temperature": 0.9}
    several = client.chat.completions.create(**options, n=4, seed=3)
    alone = [client.chat.completions.create(**options, seed=3 + index) for index in range(4)]
    texts = [choice.message.content for choice in several.choices]
    assert texts == [reply.choices[0].message.content for reply in alone]


def test_a_cancelled_prompt_keeps_its_chunks(client: openai.OpenAI, served: Served) -> None:
    clear(served)
    messages: list[Any] = [{"role": "user", "content": "a " * 3000}]
    seen = threading.Event()
    engine, step = served.engine, served.engine.step

    def watched(generations: Any) -> Any:
        done = step(generations)
        if generations and generations[0].sequence.length >= 2 * STEP:
            seen.set()
        return done

    engine.step = watched  # type: ignore[method-assign, assignment]
    try:
        stream = client.chat.completions.create(**OPTIONS, messages=messages, stream=True)
        assert seen.wait(30)
        stream.close()
        served.wait_until_idle()
    finally:
        engine.step = step  # type: ignore[method-assign]
    assert served.worker._store is not None and len(served.worker._store) == 1
    assert ask(client, messages)[2] >= 2 * STEP


@pytest.fixture(scope="module")
def engine(served: Served) -> Engine:
    return load(str(served.folder), None)[0]


def ended(engine: Engine, prompt: list[int]) -> Any:
    generation = engine.start(Request(prompt, max_tokens=2, prefill_step_size=64))
    while generation.finish_reason is None:
        engine.step(generation)
    return generation


def test_the_least_recently_used_goes_first(engine: Engine) -> None:
    """What two conversations begin with goes with the last of them."""
    common = [5 + i % 90 for i in range(320)]
    prompts = [[*common, *([40 + number] * 200)] for number in range(2)]
    page_bytes = engine.target.pool.page_bytes
    store = PrefixStore(engine, None)
    for prompt in prompts:
        request = Request(prompt, prefill_step_size=64)
        generation = engine.start(request, after=store.nearest(request, []))
        while generation.finish_reason is None:
            engine.step(generation)
        store.keep(generation)
    pages = store.pages
    assert engine.target.pool.pages_in_use == pages == store.bytes // page_bytes == 10 + 2 * 6
    store.free_pages(engine.target.pool.free_pages + 1)
    assert (len(store), engine.target.pool.pages_in_use) == (1, 16)
    request = Request([*prompts[1], 3], prefill_step_size=64)
    assert engine.reusable_tokens(request, store.nearest(request, [])) == 512  # type: ignore[arg-type]
    store.clear()
    assert engine.target.pool.pages_in_use == 0


def test_the_budget_is_in_bytes(engine: Engine) -> None:
    page_bytes = engine.target.pool.page_bytes
    store = PrefixStore(engine, 5 * page_bytes)
    for number in range(4):
        store.keep(ended(engine, [number + 9] * 130))
        assert store.bytes <= 5 * page_bytes
    assert len(store) == 1 and engine.target.pool.pages_in_use == 4
    store.keep(ended(engine, [3] * 40))
    assert len(store) == 1, "a prompt shorter than a chunk takes nobody's place"
    store.clear()


def test_the_log_says_where_a_prompt_departs(
    engine: Engine, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    store = PrefixStore(engine, None)
    one, other = (served.tokenizer.encode("tokens " * 60 + end) for end in ("Monday", "Friday, the 3rd"))
    store.keep(ended(engine, one))
    with caplog.at_level("INFO", "mlx_spec.server.prefix_store"):
        store.log_departure(Request(other, prefill_step_size=64), served.tokenizer, 64)
    assert "departs" in caplog.text and "'Friday, the 3rd'" in caplog.text and "'Monday'" in caplog.text
    store.clear()
