"""Format of errors in Anthropic's API.

    {"type": "error", "error": {"type": …, "message": …, "details": {"error_code": …}}, "request_id": …}

It has no field for the parameter at fault, so the message names the parameter. The error code is that of
OpenAI's format.
"""

from collections.abc import Mapping
from typing import Final, Literal, NotRequired

from typing_extensions import TypedDict

from baton.api.errors import ApiError
from baton.api.http.error_format import OPENAI, ErrorFormat

ROUTE: Final = "/v1/messages"
VERSION: Final = "anthropic-version"
"""Request header that Anthropic's clients always send, and by which they are recognised."""
KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Type of an error in Anthropic's format, by HTTP status. Any other status is an `invalid_request_error`
below 500, and an `api_error` from 500 on."""
TOO_LONG: Final = "prompt is too long"
"""Beginning of the error message for a prompt that does not fit the context. Agents recognise it and shorten
their conversation."""


class MessagesCode(TypedDict):
    error_code: str


class MessagesFault(TypedDict):
    type: str
    message: str
    details: NotRequired[MessagesCode]


class MessagesError(TypedDict):
    """Type of an error in Anthropic's format: a response body, or the last event of a failed stream."""

    type: Literal["error"]
    error: MessagesFault
    request_id: str


def anthropic_error(error: ApiError, request_id: str) -> MessagesError:
    """Return an error in Anthropic's format: the body of a response, or the last event of a failed stream."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = str(error)
    if error.code == "context_length_exceeded":
        message = f"{TOO_LONG}: {message}"
    elif error.param is not None and error.param not in message:
        message = f"'{error.param}': {message}"
    shown: MessagesFault = {"type": kind, "message": message}
    if error.code is not None:
        shown["details"] = {"error_code": error.code}
    return {"type": "error", "error": shown, "request_id": request_id}


ANTHROPIC: Final = ErrorFormat(anthropic_error, "request-id")


def error_format_of(path: str, headers: Mapping[str, str]) -> ErrorFormat:
    """Return the error format for a request: Anthropic's on its routes and for its clients, else OpenAI's."""
    if path == ROUTE or path.startswith(f"{ROUTE}/") or VERSION in headers:
        return ANTHROPIC
    return OPENAI
