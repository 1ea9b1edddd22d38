"""Conversion of errors to gRPC statuses and back, by one table for all services.

The error's class name travels in the trailing metadata. So a caller can distinguish two errors with one
status without reading their texts.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import grpc

from baton.pages.errors import LayoutMismatch, Truncated
from baton.rooms.errors import (
    LocalBug,
    NameInUse,
    NoCapacity,
    NoSuchWorker,
    NotConnected,
    NotGone,
    PeerFault,
    Refusal,
    RoomExists,
    RosterFull,
    TurnStalled,
    UnknownRoom,
    UnknownWorker,
    WorkerRefused,
)
from baton.wire.baton.v1 import inference_pb2
from baton.wire.conversions import TEXT_CHARS_MAX, Malformed

KIND_KEY: Final = "baton-error"
FIELD_KEY: Final = "baton-field"


class WrongIncarnation(Refusal):
    """The message was meant for another process of this worker, for example an earlier one."""


class Draining(Refusal):
    """The worker is draining and takes no new rooms."""


class MailboxFull(Refusal):
    """The worker's mailbox is full: more commands wait than its rooms can ever need."""


class CommandTooLong(Refusal):
    """The command to the worker is longer than TAKEN_BYTES_MAX, so that no turn can take it."""


class NotQuiet(NotConnected):
    """The decode worker cannot connect yet: earlier writes to it may not have ended.

    They were posted over a connection that broke, to the same incarnation.
    """


class NotAdmitted(Refusal):
    """The caller may not call this method, according to its certificate or the secret that it sent."""


class UnknownReceiver(Refusal):
    """The decode worker is unknown to this prefill worker, because no open room names it."""


class NotProven(Refusal):
    """The caller claims to be a certain process (an incarnation of a worker), but has not proven it."""


STATUS: Final[tuple[tuple[type[Exception], grpc.StatusCode], ...]] = (
    (UnknownRoom, grpc.StatusCode.NOT_FOUND),
    (UnknownWorker, grpc.StatusCode.NOT_FOUND),
    (UnknownReceiver, grpc.StatusCode.NOT_FOUND),
    (RoomExists, grpc.StatusCode.ALREADY_EXISTS),
    (NameInUse, grpc.StatusCode.ALREADY_EXISTS),
    (RosterFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NoCapacity, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (MailboxFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (CommandTooLong, grpc.StatusCode.INVALID_ARGUMENT),
    (NoSuchWorker, grpc.StatusCode.UNAVAILABLE),
    (Draining, grpc.StatusCode.UNAVAILABLE),
    (WorkerRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (TurnStalled, grpc.StatusCode.FAILED_PRECONDITION),
    (LayoutMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (WrongIncarnation, grpc.StatusCode.FAILED_PRECONDITION),
    (NotGone, grpc.StatusCode.FAILED_PRECONDITION),
    (NotQuiet, grpc.StatusCode.FAILED_PRECONDITION),
    (NotConnected, grpc.StatusCode.FAILED_PRECONDITION),
    (NotAdmitted, grpc.StatusCode.PERMISSION_DENIED),
    (NotProven, grpc.StatusCode.UNAUTHENTICATED),
    (Malformed, grpc.StatusCode.INVALID_ARGUMENT),
    (PeerFault, grpc.StatusCode.INVALID_ARGUMENT),
    (Truncated, grpc.StatusCode.INVALID_ARGUMENT),
    (Refusal, grpc.StatusCode.INVALID_ARGUMENT),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (LocalBug, grpc.StatusCode.INTERNAL),
)


_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class RemoteError(Exception):
    """A call to another service failed: the service answered with an error, or did not answer."""

    def __init__(self, code: grpc.StatusCode, kind: str, text: str, field: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.kind = kind
        """Class name of the error at the other side; empty if there was no answer."""
        self.field = field

    @property
    def unreachable(self) -> bool:
        """Whether the failed call got no answer from the other service itself."""
        return not self.kind


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Turn a known error inside this context into its gRPC status. Other errors are bugs and propagate."""
    try:
        yield
    except Exception as error:
        for kind, code in STATUS:
            if isinstance(error, kind):
                trailing = [(KIND_KEY, type(error).__name__)]
                if isinstance(error, WorkerRefused | LayoutMismatch):
                    trailing.append((FIELD_KEY, error.field))
                text = str(error)[:TEXT_CHARS_MAX] or type(error).__name__
                await context.abort(code, text, tuple(trailing))
        raise


def refusal_to_wire(error: Exception) -> inference_pb2.Refused:
    """Return the message that refuses one room on a stream shared by rooms. Its `kind` is empty if `error` is
    a bug."""
    text = str(error)[:TEXT_CHARS_MAX] or type(error).__name__
    for kind, code in STATUS:
        if isinstance(error, kind):
            field = error.field if isinstance(error, WorkerRefused | LayoutMismatch) else ""
            kind_name = type(error).__name__
            return inference_pb2.Refused(code=code.value[0], kind=kind_name, text=text, field=field)
    return inference_pb2.Refused(
        code=grpc.StatusCode.UNKNOWN.value[0], text=f"Unexpected {type(error).__name__}: {text}"
    )


def refusal_from_wire(refused: inference_pb2.Refused) -> RemoteError:
    code = _CODES.get(refused.code, grpc.StatusCode.UNKNOWN)
    return RemoteError(code, refused.kind, refused.text[:TEXT_CHARS_MAX] or code.name, refused.field)


def remote_error(error: grpc.RpcError) -> RemoteError:
    """Return the RemoteError for a failed call of grpc or grpc.aio."""
    trailing = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    text = error.details() or error.code().name
    return RemoteError(error.code(), trailing.get(KIND_KEY, ""), text, trailing.get(FIELD_KEY, ""))
