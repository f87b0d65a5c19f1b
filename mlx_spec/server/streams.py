"""Replies over HTTP: streams that are never silent for long, and whole replies that end with their client."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mlx_spec.server.errors import ApiError
from mlx_spec.server.run import Run

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON answer; half characters, which errors may quote, are escaped."""
    return Response(json.dumps(value), status, dict(headers or {}), "application/json")


def event_stream(
    events: AsyncIterator[str],
    runs: Sequence[Run],
    seconds: float,
    ping: str | None,
    on_error: Callable[[Exception], str],
) -> Response:
    """Return a stream whose headers go out at once.

    seconds: of silence, after which a comment is sent, or a ping.
    on_error: writes an error after which the stream ends.
    """

    async def body() -> AsyncIterator[str]:
        waiting: asyncio.Future[str] | None = None
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait({waiting}, timeout=seconds)
                if not done:
                    yield ping or ": keepalive {}/{}\n\n".format(*runs[0].job.progress)
                    continue
                text, waiting = waiting.result(), None
                yield text
        except StopAsyncIteration:
            return
        except Exception as error:
            yield on_error(error)
        finally:
            if waiting is not None:
                waiting.cancel()
            cancel(runs)

    return StreamingResponse(body(), media_type="text/event-stream", headers=HEADERS)


async def unless_gone(
    request: Request,
    runs: Sequence[Run],
    reply: Awaitable[dict[str, Any]],
    on_error: Callable[[Exception], ApiError],
) -> Response:
    """Return a whole reply; where its client goes away first, nobody works on it any longer.

    on_error: returns what to raise for an error.
    """
    working, leaving = asyncio.ensure_future(reply), asyncio.ensure_future(gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return Response(json.dumps(working.result(), ensure_ascii=False), media_type="application/json")
        return Response(status_code=499)
    except Exception as error:
        raise on_error(error) from error
    finally:
        working.cancel()
        leaving.cancel()
        cancel(runs)


def cancel(runs: Sequence[Run]) -> None:
    """End all that still runs for a request."""
    for run in runs:
        run.cancel()


async def gone(request: Request) -> None:
    """Wait until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
