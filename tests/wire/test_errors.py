"""Tests that each error reaches the caller with its gRPC status, kind, text and field."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.pages.errors import LayoutMismatch, Truncated
from baton.rooms import errors as rooms_errors
from baton.rooms.errors import Refusal, WorkerRefused
from baton.wire import conversions, errors
from baton.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from baton.wire.errors import RemoteError, errors_as_status, remote_error
from tests.wire.servers import channel_to, serving

Code = grpc.StatusCode

EXPECTED: list[tuple[Exception, grpc.StatusCode, str]] = [
    (rooms_errors.UnknownRoom("x"), Code.NOT_FOUND, ""),
    (rooms_errors.UnknownWorker("x"), Code.NOT_FOUND, ""),
    (rooms_errors.RoomExists("x"), Code.ALREADY_EXISTS, ""),
    (rooms_errors.NameInUse("x"), Code.ALREADY_EXISTS, ""),
    (rooms_errors.RosterFull("x"), Code.RESOURCE_EXHAUSTED, ""),
    (rooms_errors.NoCapacity("x"), Code.RESOURCE_EXHAUSTED, ""),
    (errors.MailboxFull("x"), Code.RESOURCE_EXHAUSTED, ""),
    (errors.CommandTooLong("x"), Code.INVALID_ARGUMENT, ""),
    (rooms_errors.NoSuchWorker("x"), Code.UNAVAILABLE, ""),
    (errors.Draining("x"), Code.UNAVAILABLE, ""),
    (WorkerRefused("dtype", "float32", "bfloat16"), Code.FAILED_PRECONDITION, "dtype"),
    (LayoutMismatch("layers", 1, 2), Code.FAILED_PRECONDITION, "layers"),
    (errors.WrongIncarnation("x"), Code.FAILED_PRECONDITION, ""),
    (rooms_errors.NotConnected("x"), Code.FAILED_PRECONDITION, ""),
    (errors.NotQuiet("x"), Code.FAILED_PRECONDITION, ""),
    (errors.NotAdmitted("x"), Code.PERMISSION_DENIED, ""),
    (conversions.Malformed("x"), Code.INVALID_ARGUMENT, ""),
    (rooms_errors.StaleGeneration("x"), Code.INVALID_ARGUMENT, ""),
    (Truncated("x"), Code.INVALID_ARGUMENT, ""),
    (Refusal("the cache never holds it"), Code.INVALID_ARGUMENT, ""),
    (TimeoutError("not yet"), Code.DEADLINE_EXCEEDED, ""),
    (TimeoutError(), Code.DEADLINE_EXCEEDED, ""),
    (rooms_errors.LocalBug("x"), Code.INTERNAL, ""),
]


class Raising(workers_pb2_grpc.WorkerRegistryServicer):
    error: Exception

    async def Leave(self, request: Any, context: Any) -> workers_pb2.LeaveReply:  # noqa: N802
        async with errors_as_status(context):
            raise self.error


@pytest.fixture
async def raising() -> AsyncIterator[tuple[Raising, workers_pb2_grpc.WorkerRegistryStub]]:
    servicer = Raising()  # type: ignore[abstract]

    def add(server: grpc.aio.Server) -> None:
        workers_pb2_grpc.add_WorkerRegistryServicer_to_server(servicer, server)

    async with serving(add) as address, channel_to(address) as channel:
        yield servicer, workers_pb2_grpc.WorkerRegistryStub(channel)


async def call(stub: Any) -> RemoteError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Leave(workers_pb2.LeaveRequest(), timeout=20)
    return remote_error(error.value)


async def test_every_error_arrives_with_its_code_kind_text_and_field(raising: Any) -> None:
    servicer, stub = raising
    for error, code, field in EXPECTED:
        servicer.error = error
        remote = await call(stub)
        assert (remote.code, remote.kind, remote.field) == (code, type(error).__name__, field)
        assert str(remote) == (str(error) or "TimeoutError")
        assert not remote.unreachable


def test_no_refusal_is_left_out_of_the_table() -> None:
    def kinds(kind: type[Exception]) -> set[type[Exception]]:
        return {kind}.union(*(kinds(each) for each in kind.__subclasses__()))

    tabled = tuple(kind for kind, _ in errors.STATUS)
    ours = [each for each in kinds(rooms_errors.RoomError) if each.__module__.startswith("baton.")]
    assert [each for each in ours if not issubclass(each, tabled)] == [rooms_errors.RoomError]


async def test_a_bug_is_no_answer_of_the_services_own(raising: Any) -> None:
    servicer, stub = raising
    servicer.error = KeyError("x")
    remote = await call(stub)
    assert remote.code is Code.UNKNOWN
    assert remote.unreachable


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    async with channel_to("127.0.0.1:1") as channel:
        remote = await call(workers_pb2_grpc.WorkerRegistryStub(channel))
    assert remote.code is Code.UNAVAILABLE
    assert remote.unreachable
    assert str(remote)
