"""Formats of error responses. Each API has its own, which also applies to requests refused before any
route."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import JSONResponse

from baton.api.errors import ApiError


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """Format in which one API writes errors and request ids."""

    error: Callable[[ApiError, str], Mapping[str, Any]]
    """Function that returns the body of an error response. It takes the error and the request id."""
    id_header: str = "x-request-id"
    """Name of the response header in which this API's clients expect the request id. `X-Request-Id` is always
    sent."""

    def answer(self, error: ApiError, request_id: str) -> JSONResponse:
        return JSONResponse(self.error(error, request_id), status_code=error.status, headers=error.headers)


OPENAI: Final = ErrorFormat(lambda error, _: error.body)

ErrorFormatOf = Callable[[str, Mapping[str, str]], ErrorFormat]
"""Function that takes a request's path and headers, and returns the error format of the API that the client
uses."""


def openai_only(_path: str, _headers: Mapping[str, str]) -> ErrorFormat:
    return OPENAI
