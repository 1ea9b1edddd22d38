"""Formats of errors: each API has its own, also for requests that are refused before any route."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import JSONResponse

from baton.api.errors import ApiError


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How one API writes errors and request ids."""

    error: Callable[[ApiError, str], Mapping[str, Any]]
    """Makes the body of an error, with the request's id."""
    id_header: str = "x-request-id"
    """A second response header for the request id."""

    def answer(self, error: ApiError, request_id: str) -> JSONResponse:
        return JSONResponse(self.error(error, request_id), status_code=error.status, headers=error.headers)


OPENAI: Final = ErrorFormat(lambda error, _: error.body)

ErrorFormatOf = Callable[[str, Mapping[str, str]], ErrorFormat]
"""Chooses the format by the path and the headers of a request."""


def openai_only(_path: str, _headers: Mapping[str, str]) -> ErrorFormat:
    return OPENAI
