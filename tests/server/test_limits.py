"""Who is let in, what is too much, and what happens while nothing happens."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import anthropic
import mlx.core as mx
import openai
import pytest
from served import Served, serve, write_pair

MESSAGES: list[Any] = [{"role": "user", "content": "The "}]
ORIGIN = "https://app.example"
IDLE = 0.4


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("strict")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_SPEC_CACHE", str(folder / "cache"))
        with serve(
            write_pair(folder / "tiny"),
            None,
            api_key="secret",
            origins=(ORIGIN,),
            hosts=("mac.example",),
            max_body_bytes=50_000,
            max_waiting=0,
            idle_seconds=IDLE,
        ) as server:
            yield server


@pytest.fixture
def keyed(strict: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key="secret", max_retries=0, timeout=60) as found:
        yield found


def send(served: Served, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Return status, headers and body of an answer."""
    connection = http.client.HTTPConnection(urlparse(served.url).netloc, timeout=60)
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), sent)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    is_json = answer.headers.get("content-type", "").startswith("application/json")
    return answer.status, answer.headers, json.loads(text) if text and is_json else text.decode()


def test_without_the_key_nothing_is_told(strict: Served) -> None:
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        status, headers, body = send(strict, "GET", path)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert body["error"]["code"] == "invalid_api_key"
    with (
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="guess", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    with (
        anthropic.Anthropic(base_url=strict.url, api_key="guess", max_retries=0) as claude,
        pytest.raises(anthropic.AuthenticationError),
    ):
        claude.messages.create(model="tiny", max_tokens=1, messages=MESSAGES)


def test_either_header_carries_the_key(strict: Served) -> None:
    assert send(strict, "GET", "/v1/models", Authorization="Bearer secret")[0] == 200
    assert send(strict, "GET", "/v1/models", x_api_key="secret")[0] == 200


def test_page_and_health_are_open(strict: Served) -> None:
    status, headers, page = send(strict, "GET", "/")
    assert status == 200 and "<textarea" in page and "default-src 'none'" in headers["Content-Security-Policy"]
    assert send(strict, "HEAD", "/")[0] == 200
    assert send(strict, "GET", "/health")[2]["status"] == "ready"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "localhost.evil.example", ""])
def test_other_names_are_refused(strict: Served, host: str) -> None:
    """As of a site that points its own name at this machine."""
    assert send(strict, "GET", "/health", Host=host)[0] in (400, 403)


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8080", "192.168.0.7", "MAC.example"])
def test_its_own_names_are_not(strict: Served, host: str) -> None:
    assert send(strict, "GET", "/health", Host=host)[0] == 200


def test_pages_of_other_origins(strict: Served, served: Served) -> None:
    """None are let in, but for those that are named, with what a browser asks before."""
    assert send(served, "GET", "/v1/models", Origin=ORIGIN)[0] == 403
    assert send(served, "GET", "/v1/models", Origin=served.url)[0] == 200
    ask = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
    asked = send(
        strict, "OPTIONS", "/v1/models", Origin=ORIGIN, Access_Control_Request_Private_Network="true", **ask
    )
    assert asked[0] == 200 and asked[1]["Access-Control-Allow-Origin"] == ORIGIN
    assert asked[1]["Access-Control-Allow-Private-Network"] == "true"
    got = send(strict, "GET", "/v1/models", Origin=ORIGIN, Authorization="Bearer secret")
    assert got[0] == 200 and got[1]["Access-Control-Allow-Origin"] == ORIGIN
    assert send(strict, "GET", "/health", Origin="https://evil.example")[0] == 403


def test_a_body_that_is_too_large(strict: Served, keyed: openai.OpenAI) -> None:
    big: list[Any] = [{"role": "user", "content": "x" * 60_000}]
    with pytest.raises(openai.APIStatusError) as caught:
        keyed.chat.completions.create(model="tiny", messages=big)
    assert caught.value.status_code == 413

    def pieces() -> Iterator[bytes]:
        for _ in range(60):
            yield b"x" * 1000

    connection = http.client.HTTPConnection(urlparse(strict.url).netloc, timeout=60)
    connection.request("POST", "/v1/completions", pieces(), {"x-api-key": "secret"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize(
    "body",
    [b"{", b"", b"[]", b'"text"', b"\xff\xfe", b"[" * 40_000, b'{"messages": NaN}', b'{"messages": "x"}', b"null"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_bodies_that_are_none(strict: Served, path: str, body: bytes) -> None:
    status, _, answer = send(strict, "POST", path, body, x_api_key="secret")
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["message"]


def test_half_characters(strict: Served) -> None:
    """JSON can hold what no text can."""
    for messages in ([{"role": "user", "content": "\ud800"}], [{"role": "\ud800", "content": "x"}]):
        status, _, answer = send(
            strict, "POST", "/v1/chat/completions", {"messages": messages}, x_api_key="secret"
        )
        assert status == 400 and answer["error"]["message"]


def test_unknown_routes_and_methods(strict: Served) -> None:
    assert send(strict, "GET", "/v1/embeddings", x_api_key="secret")[0] == 404
    assert send(strict, "GET", "/v1/chat/completions", x_api_key="secret")[0] == 405


def test_no_answer_says_where_the_model_is(strict: Served, keyed: openai.OpenAI) -> None:
    listed = keyed.models.list().to_json()
    with pytest.raises(openai.BadRequestError) as caught:
        keyed.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"num_draft_tokens": 3})
    assert str(strict.folder) not in listed + str(caught.value.body)


def test_too_many_wait(strict: Served, keyed: openai.OpenAI) -> None:
    """16 texts run; with no place to wait, the next is told to come again."""
    full = keyed.chat.completions.create(model="tiny", messages=MESSAGES, n=16, max_tokens=4000, stream=True)
    for chunk in full:
        if chunk.choices[0].delta.content:
            break
    with pytest.raises(openai.RateLimitError) as caught:
        keyed.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.response.headers["Retry-After"] == "1"
    full.close()
    strict.wait_until_idle()
    assert keyed.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).choices


def test_an_idle_model_is_unloaded_and_comes_back(strict: Served, keyed: openai.OpenAI) -> None:
    before = keyed.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8).choices
    loads, until, held = strict.worker.loads, time.monotonic() + 20, mx.get_active_memory()
    while strict.worker.state != "unloaded":
        assert time.monotonic() < until
        time.sleep(0.02)
    health = send(strict, "GET", "/health")[2]
    assert (health["status"], health["is_loaded"]) == ("ready", False)
    while held - mx.get_active_memory() < (strict.folder / "model.safetensors").stat().st_size:
        assert time.monotonic() < until, "its memory is given back"
        time.sleep(0.02)
    assert keyed.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8).choices == before
    assert strict.worker.loads == loads + 1


def test_a_running_model_is_not_unloaded(strict: Served, keyed: openai.OpenAI) -> None:
    keyed.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
    loads, started = strict.worker.loads, time.monotonic()
    with keyed.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4000, stream=True) as stream:
        for _ in stream:
            if time.monotonic() - started > 3 * IDLE:
                break
    assert strict.worker.loads == loads and strict.worker.state == "ready"
    strict.wait_until_idle()


def test_a_silent_stream_is_kept_alive(served: Served) -> None:
    """While a round takes long: a comment for OpenAI's clients, a ping for Anthropic's."""
    engine, step = served.engine, served.engine.step
    may_go_on = threading.Event()

    def slow(generations: Any) -> Any:
        may_go_on.wait(20)
        return step(generations)

    engine.step = slow  # type: ignore[method-assign, assignment]
    try:
        for path, sign in (("/v1/chat/completions", b": keepalive"), ("/v1/messages", b"event: ping")):
            may_go_on.clear()
            connection = http.client.HTTPConnection(urlparse(served.url).netloc, timeout=60)
            body = json.dumps({"messages": MESSAGES, "max_tokens": 4, "stream": True})
            started = time.monotonic()
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200 and time.monotonic() - started < 1
            while not (line := answer.readline()).startswith(sign):
                assert line
            may_go_on.set()
            assert answer.read()
            connection.close()
    finally:
        may_go_on.set()
        served.wait_until_idle()
        engine.step = step  # type: ignore[method-assign]


def test_a_round_that_fails_is_told_and_others_go_on(served: Served, client: openai.OpenAI) -> None:
    engine, step = served.engine, served.engine.step

    def failing(generations: Any) -> Any:
        raise RuntimeError("out of memory at /somewhere")

    served.wait_until_idle()
    engine.step = failing  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert "somewhere" not in str(caught.value)
        with pytest.raises(openai.APIError):
            list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
    finally:
        engine.step = step  # type: ignore[method-assign]
    assert client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2).choices


def test_metrics(served: Served, client: openai.OpenAI) -> None:
    def read() -> dict[str, float]:
        lines = [line for line in send(served, "GET", "/metrics")[2].splitlines() if not line.startswith("#")]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    before = read()
    client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, extra_body={"num_draft_tokens": 2}
    )
    served.wait_until_idle()
    after = read()
    label = '{model_name="tiny"}'
    assert after[f"vllm:generation_tokens_total{label}"] - before[f"vllm:generation_tokens_total{label}"] == 12
    assert after[f"vllm:num_requests_running{label}"] == after[f"vllm:num_requests_waiting{label}"] == 0
    assert after[f"vllm:spec_decode_num_draft_tokens_total{label}"] > before.get(
        f"vllm:spec_decode_num_draft_tokens_total{label}", 0
    )
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"}' in after
    assert after[f"vllm:time_to_first_token_seconds_count{label}"] >= 1
