"""Conversion of errors of the backend and of the HTTP server into errors that clients read."""

from baton.api.backend import BackendError, NoWorker, Overloaded, RoomFailed
from baton.api.errors import RATE_LIMIT, UNAVAILABLE, ApiError
from baton.web.http_refusals import HttpRefusal


def as_api_error(error: ApiError | BackendError | HttpRefusal) -> ApiError:
    """Return the error that the client reads, for an error that ended its request."""
    match error:
        case ApiError():
            return error
        case BackendError():
            return from_backend(error)
        case HttpRefusal(status=status, code=code):
            return ApiError(status, str(error), code=code)


def from_backend(error: BackendError) -> ApiError:
    """Return the error that the client reads if the workers could not serve a valid request: a 429 or a
    503."""
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
