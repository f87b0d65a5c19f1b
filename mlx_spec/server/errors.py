"""What a client did wrong or cannot have, in the words and shapes of both interfaces."""

from collections.abc import Mapping
from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer that is an error.

    status: of HTTP.
    message: what is needed, what was found and what to do.
    param: the field that it is about, if it is one.
    code: a word for programs, as OpenAI has them.
    headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error of a field that cannot be served as asked."""
    return ApiError(400, message, param, code)


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's shape."""
    kind = "server_error" if error.status >= 500 else TYPES.get(error.status, "invalid_request_error")
    if error.status == 404:
        kind = "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the body of an error in Anthropic's shape."""
    kind = TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
