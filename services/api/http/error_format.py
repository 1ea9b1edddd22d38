"""How does an API speak to its callers beside its answers: of what went wrong, and of which request?

Each has a shape of its own for errors, which holds for what is refused before any route, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import JSONResponse
from starlette.types import Scope

from baton.api.errors import ApiError


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """Of one API."""

    error: Callable[[ApiError, str], dict[str, Any]]
    """The body of an error, by the id of its request."""
    id_header: str = "x-request-id"
    """A second header in which the id goes back."""

    def answer(self, error: ApiError, request_id: str) -> JSONResponse:
        return JSONResponse(self.error(error, request_id), status_code=error.status, headers=error.headers)


OPENAI: Final = ErrorFormat(lambda error, _: error.body)

ErrorFormatOf = Callable[[Scope], ErrorFormat]
"""By which manners the caller of a request is spoken to."""


def openai_only(_: Scope) -> ErrorFormat:
    return OPENAI
