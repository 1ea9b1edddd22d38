"""Errors that callers read, in OpenAI's format. Other APIs' formats (`error_format.py`) have the same facts.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

`param` is the path of the field at fault (`messages[0].role`), `code` one of a closed set.
"""

from collections.abc import Mapping
from typing import Final

from typing_extensions import TypedDict

INVALID: Final = "invalid_request_error"
UNAVAILABLE: Final = "service_unavailable_error"
RATE_LIMIT: Final = "rate_limit_error"
SERVER: Final = "server_error"
CLIENT_GONE: Final = 499
"""Status counted for a request whose client was gone before its answer began. It is never sent."""
NAME_SHOWN_MAX: Final = 128


class Error(TypedDict):
    message: str
    type: str
    param: str | None
    """Path of the field at fault, such as `messages[1].role`."""
    code: str | None


class ErrorAnswer(TypedDict):
    error: Error


class ApiError(Exception):
    """An error that is answered with an error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(_sentence(message))
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> ErrorAnswer:
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code},
        }


def _sentence(message: str) -> str:
    """Return the message with one full stop at most, also if a library's or a template's sentence ends it."""
    text = message.rstrip()
    return text.rstrip(".") + "." if text.endswith("..") else text


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """Return a 400: the value of `param` cannot be served."""
    return ApiError(400, message, param=param, code=code)


def unknown_model(name: str) -> ApiError:
    return ApiError(404, f"The model '{shown(name)}' does not exist.", param="model", code="model_not_found")


def shown(name: str) -> str:
    """Return a caller's name, shortened, for an error message."""
    return name if len(name) <= NAME_SHOWN_MAX else name[:NAME_SHOWN_MAX] + "…"


def too_long(param: str, context_tokens: int, why: str) -> ApiError:
    """Return a 400: the tokens do not fit the context. The first sentence is OpenAI's, by which some clients
    know that they have to ask for less: not all look at the code."""
    message = f"This model's maximum context length is {context_tokens} tokens. However, {why}."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def internal_error() -> ApiError:
    """Return a 500: a bug of Baton. The log has it, under the request's id."""
    return ApiError(
        500, "The server had an internal error; its log has it.", kind=SERVER, code="internal_error"
    )
