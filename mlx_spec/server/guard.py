"""What a request must be before it is looked at: to this host, from no other page, with the key, not too large."""

import hmac
import ipaddress
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_spec.server.errors import ApiError
from mlx_spec.server.settings import Settings

# The page asks for the key itself; who watches over the server's health need not have it.
OPEN = ("/", "/health")
# How many times the largest body is read before a client is told that its own is too large.
DRAINED = 4


class Guard:
    """Lets requests through to an application, or answers them itself."""

    def __init__(self, app: ASGIApp, settings: Settings, answer: Any) -> None:
        """answer: from a scope and an ApiError to a response."""
        self._app, self._settings, self._answer = app, settings, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._check(scope, headers)
            first = await self._body(headers, receive)
        except ApiError as error:
            await self._answer(scope, error)(scope, receive, send)
            return
        given = [first]

        async def replayed() -> Message:
            return given.pop() if given else await receive()

        await self._app(scope, replayed, send)

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raise ApiError for a request that is not meant for this server, or has no right to it."""
        host = host_of(headers.get("host", ""))
        if not self._is_ours(host):
            raise ApiError(
                403, f"This server is not reached by the name {host!r}; start it with --allowed-hosts {host}."
            )
        origin = headers.get("origin")
        is_same = origin is not None and origin.split("://", 1)[-1] == headers.get("host")
        if origin is not None and not is_same and not {"*", origin} & {*self._settings.origins}:
            raise ApiError(403, f"Pages of {origin} may not use this server; start it with --allowed-origins.")
        key = self._settings.api_key
        if key is None or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            return
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise ApiError(
                401,
                "The API key is missing or wrong.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _is_ours(self, host: str) -> bool:
        if host == "localhost" or host.endswith(".localhost") or host in self._settings.hosts:
            return True
        try:
            # Another site can point its name at this machine, but not an address.
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> Message:
        """Return the whole body in one message. Raises ApiError where it is too large.

        A little of what is too much is read on: a client that is still sending might not see the answer.
        """
        limit, chunks, size, is_over = self._settings.max_body_bytes, list[bytes](), 0, False
        length = headers.get("content-length", "0")
        is_huge = length.isdecimal() and int(length) > DRAINED * limit
        while not is_over and not is_huge:
            message = await receive()
            if message["type"] != "http.request":
                return message
            size += len(message.get("body", b""))
            if size <= limit:
                chunks.append(message.get("body", b""))
            is_over, is_huge = not message.get("more_body", False), size > DRAINED * limit
        if is_huge or size > limit:
            raise ApiError(413, f"The body is larger than {limit} bytes.", headers={"Connection": "close"})
        return {"type": "http.request", "body": b"".join(chunks), "more_body": False}


def host_of(header: str) -> str:
    """Return the name or address in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].split("]", 1)[0].lower()
    return header.rsplit(":", 1)[0].lower() if header.count(":") == 1 else header.lower()
