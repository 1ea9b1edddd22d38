"""Errors of the backend and of the HTTP server, as the errors that callers read."""

from baton.api.backend import BackendError, NoWorker, Overloaded, RoomFailed
from baton.api.errors import RATE_LIMIT, UNAVAILABLE, ApiError
from baton.web.http_refusals import HttpRefusal


def as_api_error(error: ApiError | BackendError | HttpRefusal) -> ApiError:
    """Return what the caller reads about an error that ended a request before its answer began."""
    match error:
        case ApiError():
            return error
        case BackendError():
            return from_backend(error)
        case HttpRefusal(status=status, code=code):
            return ApiError(status, str(error), code=code)


def from_backend(error: BackendError) -> ApiError:
    """Return what the caller reads when the workers could not serve a valid request."""
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
