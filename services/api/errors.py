"""How is the caller told what went wrong? In OpenAI's shape, whatever it was, and where an API has another
(`manners.py`), by the same facts.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

`param` is the path of the field at fault (`messages[0].role`), `code` a closed set of words.
"""

from collections.abc import Mapping
from typing import Any, Final

from baton.api.backend import BackendError, NoWorker, Overloaded, RoomFailed
from baton.web.http_refusals import HttpRefusal

INVALID: Final = "invalid_request_error"
UNAVAILABLE: Final = "service_unavailable_error"
RATE_LIMIT: Final = "rate_limit_error"
SERVER: Final = "server_error"
CLIENT_GONE: Final = 499
"""Counted as the status of a request whose client was gone before its answer began: nobody is answered so."""
NAME_SHOWN_MAX: Final = 128


class ApiError(Exception):
    """Anything that is answered with an error body."""

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
    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code},
        }


def _sentence(message: str) -> str:
    """With one full stop at most, also where a library's or a template's sentence ends it."""
    text = message.rstrip()
    return text.rstrip(".") + "." if text.endswith("..") else text


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """400: the value of `param` cannot be served."""
    return ApiError(400, message, param=param, code=code)


def unknown_model(name: str) -> ApiError:
    return ApiError(404, f"The model '{shown(name)}' does not exist.", param="model", code="model_not_found")


def shown(name: str) -> str:
    """What a caller named, for the answer, which is not to be as long as the question."""
    return name if len(name) <= NAME_SHOWN_MAX else name[:NAME_SHOWN_MAX] + "…"


def too_long(param: str, context_tokens: int, why: str) -> ApiError:
    """400: there is no room for so many tokens. Clients that then ask for less, or another model, know it by
    the first sentence, which is OpenAI's: not all look at the code."""
    message = f"This model's maximum context length is {context_tokens} tokens. However, {why}."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def internal_error() -> ApiError:
    """500: a bug here. The log has it, under the request's id; the caller is told no more."""
    return ApiError(
        500, "The server had an internal error; its log has it.", kind=SERVER, code="internal_error"
    )


def as_api_error(error: "ApiError | BackendError | HttpRefusal") -> ApiError:
    """What ended a request before its answer began, as its caller is told."""
    match error:
        case ApiError():
            return error
        case BackendError():
            return from_backend(error)
        case HttpRefusal(status=status, code=code):
            return ApiError(status, str(error), code=code)


def from_backend(error: BackendError) -> ApiError:
    """What the caller reads when the pipeline could not serve a valid request."""
    match error:
        case Overloaded(retry_after_s=seconds):
            return ApiError(
                429,
                str(error),
                kind=RATE_LIMIT,
                code="overloaded",
                headers={"Retry-After": str(max(1, seconds))},
            )
        case NoWorker():
            return ApiError(503, str(error), kind=UNAVAILABLE, code="no_worker")
        case RoomFailed(reason=reason):
            return ApiError(503, str(error), kind=UNAVAILABLE, code=reason.value)
        case _:
            return ApiError(503, str(error), kind=UNAVAILABLE, code="unavailable")
