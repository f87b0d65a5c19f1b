"""Many clients at once, some of whom leave or ask for what cannot be: no reply is lost, mixed or torn."""

import json
import random
import threading
import time
from typing import Any

import httpx2
import mlx.core as mx
import openai
import pytest
from served import Served


def text_of(url: str, body: dict[str, Any]) -> str:
    """Return the text of a stream, read as lines, and check that it is whole."""
    texts, reason = [], None
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        assert reason is None, "nothing comes after the end"
        texts.append(choice["delta"].get("content", ""))
        reason = choice["finish_reason"]
    assert reason in ("stop", "length")
    return "".join(texts)


def body_of(number: int) -> dict[str, Any]:
    """Return one of a few requests: short and long prompts, greedy and drawn."""
    content = ["The ", "A page ", "x y " * 300, "tokens of a row " * 20][number % 4]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6 + number % 4, "stream": True}
    return {**body, "temperature": 0.9, "seed": number} if number % 3 == 0 else body


class Client(threading.Thread):
    """One client, with what went wrong for it."""

    def __init__(self, served: Served, number: int, requests: int, expected: dict[int, str]) -> None:
        super().__init__()
        self.requests = requests
        self.served, self.expected, self.error = served, expected, None
        self.random = random.Random(number)
        self.whole = self.left = self.refused = 0

    def run(self) -> None:
        try:
            for _ in range(self.requests):
                self.ask(self.random.randrange(12), self.random.random())
        except BaseException as error:
            self.error = error

    def ask(self, number: int, chance: float) -> None:
        body = body_of(number)
        if chance < 0.2:
            # Leave in the middle, or before anything came.
            with httpx2.stream("POST", f"{self.served.url}/v1/chat/completions", json=body, timeout=120) as answer:
                if chance < 0.1:
                    next(answer.iter_lines())
            self.left += 1
        elif chance < 0.3:
            wrong = [{"max_tokens": -1}, {"messages": []}, {"stop": [""]}, {"colour": 1}][number % 4]
            answer = httpx2.post(f"{self.served.url}/v1/chat/completions", json={**body, **wrong}, timeout=120)
            assert answer.status_code == 400
            self.refused += 1
        else:
            assert text_of(self.served.url, body) == self.expected[number]
            self.whole += 1


@pytest.mark.parametrize(("clients", "requests"), [(8, 3), pytest.param(16, 10, marks=pytest.mark.slow)])
def test_many_clients(served: Served, clients: int, requests: int) -> None:
    """Each whole reply is the one that its request has alone; afterwards only kept prefixes hold pages."""
    expected = {number: text_of(served.url, body_of(number)) for number in range(12)}
    running = [Client(served, number, requests, expected) for number in range(clients)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    assert [each.error for each in running] == [None] * clients
    assert sum(each.whole + each.left + each.refused for each in running) == clients * requests
    assert all(sum(getattr(each, what) for each in running) for what in ("whole", "left", "refused"))
    served.wait_until_idle()
    store = served.worker._store
    assert store is not None
    assert served.engine.target.pool.pages_in_use == store.pages
    store.clear()
    assert served.engine.target.pool.pages_in_use == 0


def test_memory_is_flat(served: Served) -> None:
    def run() -> int:
        for number in (0, 1, 2, 2):
            text_of(served.url, body_of(number))
        served.wait_until_idle()
        assert served.worker._store is not None
        served.worker._store.clear()
        return mx.get_active_memory()

    run()
    first = run()
    assert max(run() for _ in range(3)) - first < 100_000


def test_a_running_stream_waits_for_two_chunks_at_most(served: Served, client: openai.OpenAI) -> None:
    """While others' long prompts are read: counted in chunks that the engine reads between two of its rounds."""
    engine, step = served.engine, served.engine.step
    gaps, gap = [0], 0
    running = threading.Event()

    def watched(generations: Any) -> Any:
        nonlocal gap
        before = [each.sequence.length for each in generations]
        rounds = step(generations)
        first = generations[0] if generations else None
        if first is not None and first.request.max_tokens == 77:
            running.set()
            read = sum(
                each.sequence.length - old > 16 for each, old in zip(generations[1:], before[1:], strict=True)
            )
            gap = 0 if rounds[0].tokens else gap + read
            gaps.append(max(read, gap))
        return rounds

    engine.step = watched  # type: ignore[method-assign, assignment]
    try:
        long = [{"role": "user", "content": f"{number} " + "a b " * 1500} for number in range(3)]
        fields: Any = {"model": "tiny", "messages": [{"role": "user", "content": "The "}]}
        stream = client.chat.completions.create(**fields, max_tokens=77, stream=True)
        threads = [
            threading.Thread(
                target=lambda message=message: client.chat.completions.create(
                    **{**fields, "messages": [message], "max_tokens": 1}
                )
            )
            for message in long
        ]
        for thread in threads:
            thread.start()
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        for thread in threads:
            thread.join()
    finally:
        served.wait_until_idle()
        engine.step = step  # type: ignore[method-assign]
    assert running.is_set() and text and max(gaps) in (1, 2)
    assert served.worker.counts.running == 0


def test_a_long_prompt_that_is_given_up_stops_within_a_chunk(served: Served, client: openai.OpenAI) -> None:
    served.wait_until_idle()
    engine = served.engine
    long: Any = [{"role": "user", "content": "q r " * 1500}]
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.15).chat.completions.create(model="tiny", messages=long, max_tokens=500)
    until = time.monotonic() + 20
    while served.worker.counts.running or served.worker.counts.waiting:
        assert time.monotonic() < until
        time.sleep(0.005)
    assert served.worker._store is not None
    assert engine.target.pool.pages_in_use == served.worker._store.pages
