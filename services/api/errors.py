"""Errors that clients read, in OpenAI's format. Other APIs' formats (`http/error_format.py`) are made from
them.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

`param` is the path of the invalid field (`messages[0].role`), and `code` is one of a fixed set of words.
"""

from collections.abc import Mapping
from typing import Final

from typing_extensions import TypedDict

INVALID: Final = "invalid_request_error"
UNAVAILABLE: Final = "service_unavailable_error"
RATE_LIMIT: Final = "rate_limit_error"
SERVER: Final = "server_error"
CLIENT_GONE: Final = 499
"""HTTP status counted for a request whose client disconnected before the response began. It is never sent."""
NAME_SHOWN_MAX: Final = 128


class Error(TypedDict):
    message: str
    type: str
    param: str | None
    """Path of the invalid field, such as `messages[1].role`."""
    code: str | None


class ErrorAnswer(TypedDict):
    error: Error


class ApiError(Exception):
    """Error that the client gets: an HTTP status and an error body in the format of the called API."""

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
    """Return the message with at most one full stop at its end. A quoted text of a library or a chat template
    may already end with one."""
    text = message.rstrip()
    return text.rstrip(".") + "." if text.endswith("..") else text


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """Return a 400 error: the value of the field `param` cannot be served."""
    return ApiError(400, message, param=param, code=code)


def unknown_model(name: str) -> ApiError:
    return ApiError(404, f"The model '{shown(name)}' does not exist.", param="model", code="model_not_found")


def shown(name: str) -> str:
    """Return a name that a client chose, shortened to NAME_SHOWN_MAX characters for an error message."""
    return name if len(name) <= NAME_SHOWN_MAX else name[:NAME_SHOWN_MAX] + "…"


def too_long(param: str, context_tokens: int, why: str) -> ApiError:
    """Return a 400 error: the tokens do not fit the model's context. `why`: second half of the message.

    The message's first sentence is OpenAI's. Some clients recognise this error by that sentence and not by
    its code. They then ask for fewer tokens.
    """
    message = f"This model's maximum context length is {context_tokens} tokens. However, {why}."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def internal_error() -> ApiError:
    """Return a 500 error for a bug of Baton. The log has the cause, under the request's id."""
    return ApiError(
        500, "The server had an internal error; its log has it.", kind=SERVER, code="internal_error"
    )
