"""Errors for clients whose requests got no pair of workers."""

from typing import Final

from baton.api.backend import BackendError, NoWorker, Overloaded
from baton.bootstrap.admission.admission import Admission
from baton.bootstrap.admission.placement_request import QueueFull
from baton.rooms.errors import NoSuchWorker
from baton.rooms.request import Request

NO_SPACE: Final = "no pair of workers had space in time"


def not_placed(
    admission: Admission, request: Request, error: NoSuchWorker | QueueFull | TimeoutError
) -> BackendError:
    """Return the error for the client of a request that waited for its first place and got none."""
    if isinstance(error, NoSuchWorker):
        return NoWorker(str(error))
    after_s = admission.retry_after_s(request.priority, request.tenant)
    return Overloaded(f"every worker is busy: {str(error) or NO_SPACE}", after_s)
