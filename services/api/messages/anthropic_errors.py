"""How does Anthropic's API tell what went wrong?

    {"type": "error", "error": {"type": …, "message": …, "details": {"error_code": …}}, "request_id": …}

It names no field beside the message, so that the message names it. The code is that of OpenAI's shape.
"""

from collections.abc import Mapping
from typing import Any, Final

from starlette.types import Scope

from baton.api.errors import ApiError
from baton.api.http.error_format import OPENAI, ErrorFormat
from baton.api.http.request_headers import header

ROUTE: Final = "/v1/messages"
VERSION: Final = b"anthropic-version"
"""A header that its clients send everywhere."""
KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By the status; of others the caller is at fault below 500, and nobody knows it from there on."""
TOO_LONG: Final = "prompt is too long"
"""Agents that then shorten their conversation know it by these words."""


def told(error: ApiError, request_id: str) -> dict[str, Any]:
    """The body of an error, and the last event of a stream that broke off."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = str(error)
    if error.code == "context_length_exceeded":
        message = f"{TOO_LONG}: {message}"
    elif error.param is not None and error.param not in message:
        message = f"'{error.param}': {message}"
    shown: dict[str, Any] = {"type": kind, "message": message}
    if error.code is not None:
        shown["details"] = {"error_code": error.code}
    return {"type": "error", "error": shown, "request_id": request_id}


ANTHROPIC: Final = ErrorFormat(told, "request-id")


def error_format_of(scope: Scope) -> ErrorFormat:
    """By the route, whoever asks, and on the others by who asks."""
    path = scope["path"]
    if path == ROUTE or path.startswith(f"{ROUTE}/") or header(scope, VERSION) is not None:
        return ANTHROPIC
    return OPENAI
