"""The HTTP application: routes, and errors in the shape of the interface that was spoken."""

import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from mlx_spec.server.anthropic_messages import PING, CountBody, MessagesBody, MessageWriter, event
from mlx_spec.server.body import data
from mlx_spec.server.errors import ApiError, anthropic_error, openai_error
from mlx_spec.server.guard import Guard
from mlx_spec.server.metrics import Metrics
from mlx_spec.server.openai_chat import ChatBody, ChatWriter
from mlx_spec.server.openai_completions import CompletionBody, CompletionWriter
from mlx_spec.server.openai_responses import ResponsesBody, ResponseWriter
from mlx_spec.server.service import Service
from mlx_spec.server.settings import Settings
from mlx_spec.server.streams import event_stream, json_response, unless_gone
from mlx_spec.server.worker import Worker

# For the description of the interface: every route may answer these.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
    for status, text in {
        400: "A field cannot be served as asked; the error names it.",
        401: "The API key is missing or wrong.",
        403: "The request is not meant for this server.",
        404: "Another model is asked for.",
        413: "The body is too large.",
        429: "Too many requests wait.",
        503: "The model is being loaded.",
    }.items()
}
# Of routes whose replies may be streams.
REPLIES: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {
        "description": "A whole reply, or a stream of events.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {},
        },
    },
}


# The page runs its own script and speaks to its own server, nothing else.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}


def make_app(worker: Worker, settings: Settings, metrics: Metrics) -> ASGIApp:
    """Return the application of a server."""
    service = Service(worker, settings)
    metrics.watch(worker)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="mlx_spec", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.openapi = without_422(app.openapi)  # type: ignore[method-assign]
    add_errors(app, service)
    add_state(app, service)
    add_metrics(app, metrics)
    add_page(app)
    add_openai(app, service)
    add_anthropic(app, service)
    guarded: ASGIApp = Guard(app, settings, answer_error)
    if settings.origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
        )
    return guarded


def without_422(describe: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Return the description of the interface without a status that FastAPI would send, and this server never."""

    def described() -> dict[str, Any]:
        found = describe()
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return found

    return described


def add_errors(app: FastAPI, service: Service) -> None:
    """Answer every error in the shape of the interface that was spoken."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return answer_error(request.scope, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return answer_error(request.scope, validation_error(error))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return answer_error(request.scope, ApiError(error.status_code, str(error.detail), headers=error.headers))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return answer_error(request.scope, service.error_of(error))


def answer_error(scope: Any, error: ApiError) -> Response:
    """Return an error as an answer."""
    if scope["path"].startswith("/v1/messages"):
        request_id = f"req_{uuid.uuid4().hex[:24]}"
        headers = {**error.headers, "request-id": request_id}
        return json_response(anthropic_error(error, request_id), error.status, headers)
    return json_response(openai_error(error), error.status, error.headers)


def validation_error(error: RequestValidationError) -> ApiError:
    """Return what is wrong with a body, by its first fault."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        at = first["loc"][-1]
        return ApiError(400, f"The body is no JSON: {first['ctx']['error']} at character {at}.")
    # Names of types, which pydantic adds where there are several, are no part of the field.
    path = [str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    param = ".".join(part for part in path if part not in ("body", "int", "float", "str", "bool"))
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"There is no option {param}.", param)
    if not param:
        return ApiError(400, f"The body must be a JSON object with Content-Type application/json: {first['msg']}.")
    return ApiError(400, f"{param}: {first['msg']}.", param)


def add_state(app: FastAPI, service: Service) -> None:
    """Say what is served, and how it is."""
    worker, settings = service.worker, service.settings
    created = int(time.time())

    @app.get("/health", responses=ERRORS)
    async def health() -> Response:
        status = "wedged" if worker.is_wedged else {"unloaded": "ready"}.get(worker.state, worker.state)
        value = {"status": status, "model": settings.model_id, "is_loaded": worker.state == "ready"}
        return json_response(value, 200 if status == "ready" else 503)

    def described() -> dict[str, Any]:
        context = worker.context
        return {
            "id": settings.model_id,
            "object": "model",
            "created": created,
            "owned_by": "mlx_spec",
            "context_length": context,
            "max_model_len": context,
        }

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> Response:
        return json_response({"object": "list", "data": [described()]})

    @app.get("/v1/models/{model:path}", responses=ERRORS)
    async def model(model: str) -> Response:
        service.require_model(model)
        return json_response(described())


def add_metrics(app: FastAPI, metrics: Metrics) -> None:
    """Tell Prometheus."""

    @app.get("/metrics", responses=ERRORS, response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_page(app: FastAPI) -> None:
    """Serve the chat page, one file that needs no other."""
    page = (files("mlx_spec.server") / "chat.html").read_bytes()

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def chat_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)


def add_openai(app: FastAPI, service: Service) -> None:
    """Serve OpenAI's interfaces."""
    settings = service.settings

    def error_event(error: Exception) -> str:
        return data(openai_error(service.error_of(error)))

    @app.post("/v1/chat/completions", responses=REPLIES)
    @app.post("/chat/completions", include_in_schema=False)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        run = service.run(await service.prepare(body.model, body.asked()))
        writer = ChatWriter(body, run, settings.model_id)
        if not body.stream:
            return await unless_gone(request, [run], writer.whole(), service.error_of)
        return event_stream(writer.stream(), [run], settings.keepalive_seconds, None, error_event)

    @app.post("/v1/completions", responses=REPLIES)
    @app.post("/completions", include_in_schema=False)
    async def completions(request: Request, body: CompletionBody) -> Response:
        runs = service.run_all([await service.prepare(body.model, asked) for asked in body.asked()])
        writer = CompletionWriter(body, runs, settings.model_id)
        if not body.stream:
            return await unless_gone(request, runs, writer.whole(), service.error_of)
        return event_stream(writer.stream(), runs, settings.keepalive_seconds, None, error_event)

    @app.post("/v1/responses", responses=REPLIES)
    @app.post("/responses", include_in_schema=False)
    async def responses(request: Request, body: ResponsesBody) -> Response:
        run = service.run(await service.prepare(body.model, body.asked()))
        writer = ResponseWriter(body, run, settings.model_id)
        if not body.stream:
            return await unless_gone(request, [run], writer.whole(), service.error_of)

        def failed(error: Exception) -> str:
            return writer.failed(service.error_of(error))

        return event_stream(writer.stream(), [run], settings.keepalive_seconds, None, failed)


def add_anthropic(app: FastAPI, service: Service) -> None:
    """Serve Anthropic's messages."""
    settings = service.settings

    def error_event(error: Exception) -> str:
        return event(anthropic_error(service.error_of(error), f"req_{uuid.uuid4().hex[:24]}"))

    @app.post("/v1/messages", responses=REPLIES)
    async def messages(request: Request, body: MessagesBody) -> Response:
        run = service.run(await service.prepare(body.model, body.asked()))
        writer = MessageWriter(run, settings.model_id)
        if not body.stream:
            return await unless_gone(request, [run], writer.whole(), service.error_of)
        return event_stream(writer.stream(), [run], settings.keepalive_seconds, PING, error_event)

    @app.post("/v1/messages/count_tokens", responses=ERRORS)
    async def count_tokens(body: CountBody) -> Response:
        return json_response({"input_tokens": await service.count(body.model, body.asked())})
