"""Tests that bytes which are not a protobuf message get the answer of any malformed message."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc, workers_pb2, workers_pb2_grpc
from baton.wire.errors import errors_as_status, remote_error
from tests.wire.servers import channel_to, serving, until

PATHS = ["/baton.v1.PresenceService/WhoIsThere", "/baton.v1.PrefillService/RunRoom"]
STREAM = "/baton.v1.PrefillService/RunRooms"


class Servicer(inference_pb2_grpc.PrefillServiceServicer, workers_pb2_grpc.PresenceServiceServicer):
    def __init__(self) -> None:
        self.called = self.left = 0

    async def WhoIsThere(self, request: Any, context: Any) -> workers_pb2.WhoIsThereReply:  # noqa: N802
        self.called += 1
        return workers_pb2.WhoIsThereReply()

    async def RunRoom(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.RunRoomReply]:  # noqa: N802
        self.called += 1
        try:
            while True:
                yield inference_pb2.RunRoomReply(accepted=inference_pb2.Accepted())
        finally:
            self.left += 1

    async def RunRooms(  # noqa: N802
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[inference_pb2.RunRoomsReply]:
        self.called += 1
        try:
            async with errors_as_status(context):
                async for _ in request_iterator:
                    yield inference_pb2.RunRoomsReply()
        finally:
            self.left += 1


@pytest.mark.parametrize("path", PATHS)
async def test_noise_is_malformed_and_leaves_no_traceback(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    servicer = Servicer()

    def add(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
        workers_pb2_grpc.add_PresenceServiceServicer_to_server(servicer, server)

    with caplog.at_level(logging.WARNING):
        async with serving(add) as address, channel_to(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in channel.unary_stream(path)(b"\xff\xff", timeout=20):
                    pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert remote_error(refused.value).kind == "Malformed"
    assert servicer.called == 0
    assert caplog.records == []


async def test_a_stream_that_its_caller_leaves_ends_at_once() -> None:
    servicer = Servicer()

    def add(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)

    async with serving(add) as address, channel_to(address) as channel:
        call = inference_pb2_grpc.PrefillServiceStub(channel).RunRoom(
            inference_pb2.RunRoomRequest(), timeout=20
        )
        await anext(aiter(call))
        call.cancel()
        await until(lambda: servicer.left == 1)


async def test_noise_behind_good_requests_of_a_stream_ends_it_as_malformed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servicer = Servicer()

    def add(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)

    with caplog.at_level(logging.WARNING):
        async with serving(add) as address, channel_to(address) as channel:
            call = channel.stream_stream(STREAM)(timeout=20)
            await call.write(inference_pb2.RunRoomsRequest().SerializeToString())
            replies = aiter(call)
            assert await anext(replies) == b""
            await call.write(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(replies)
    assert remote_error(refused.value).kind == "Malformed"
    assert (servicer.called, servicer.left) == (1, 1)
    assert caplog.records == []


async def test_a_stream_both_ways_that_its_caller_leaves_ends_at_once() -> None:
    servicer = Servicer()

    def add(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)

    async with serving(add) as address, channel_to(address) as channel:
        call = inference_pb2_grpc.PrefillServiceStub(channel).RunRooms(timeout=20)
        await call.write(inference_pb2.RunRoomsRequest())
        await anext(aiter(call))
        call.cancel()
        await until(lambda: servicer.left == 1)
