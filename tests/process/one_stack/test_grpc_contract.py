"""Tests of the wire contract alone: open a room, drive both workers, watch it retire."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.wire.baton.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    rooms_pb2,
    rooms_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)
from baton.wire.errors import remote_error
from tests.process.stack import Stack

PROMPT = (504, 3575, 282, 4649, 314)  # "The capital of France is"
OUTPUT_TOKENS = 4
CALL_S = 30.0


async def test_health_and_reflection_name_the_services(idle_stack: Stack) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{idle_stack.grpc_port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "baton.v1.RoomService", "baton.v1.WorkerRegistry"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=CALL_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo(iter([asked]), timeout=CALL_S)
        listed = [each.name async for reply in call for each in reply.list_services_response.service]
    assert {"baton.v1.RoomService", "baton.v1.WorkerRegistry", "grpc.health.v1.Health"} <= set(listed)


async def test_a_room_is_driven_by_grpc_alone(idle_stack: Stack) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{idle_stack.grpc_port}") as channel:
        rooms = rooms_pb2_grpc.RoomServiceStub(channel)
        opened = await rooms.OpenRoom(
            rooms_pb2.OpenRoomRequest(
                request_id="by-hand", prompt_tokens=len(PROMPT), tokens=len(PROMPT) + OUTPUT_TOKENS
            ),
            timeout=CALL_S,
        )
        watching = asyncio.create_task(_watch(rooms, opened.room))
        first, drawn = await _drive(opened)
        assert len(drawn) == OUTPUT_TOKENS
        assert drawn[0] == first, "both sides tell the same first token"
        report = rooms_pb2.RoomReport(room=opened.room, outcome=rooms_pb2.Outcome(), key=opened.key)
        await rooms.ReportRooms(rooms_pb2.ReportRoomsRequest(reports=[report]), timeout=CALL_S)
        names = await watching
        room = await rooms.GetRoom(rooms_pb2.GetRoomRequest(room=opened.room), timeout=CALL_S)
        listed = await rooms.ListRooms(rooms_pb2.ListRoomsRequest(request_id="by-hand"), timeout=CALL_S)
    assert {"granted", "computing", "sealed", "landed", "admitted", "retired"} <= set(names)
    assert room.phase == "retired"
    assert not room.HasField("cause")
    assert [each.room for each in listed.rooms] == [opened.room]


async def test_a_worker_that_lives_is_not_taken_for_gone_on_anybodys_word(idle_stack: Stack) -> None:
    process = idle_stack.services["prefill-0"].process
    async with grpc.aio.insecure_channel(f"127.0.0.1:{idle_stack.grpc_port}") as channel:
        registry = workers_pb2_grpc.WorkerRegistryStub(channel)
        incarnation = next(
            each["incarnation"] for each in idle_stack.workers() if each["name"] == "prefill-0"
        )
        exited = workers_pb2.ReportExitRequest(name="prefill-0", pid=process.pid)
        leave = workers_pb2.LeaveRequest(incarnation=int(incarnation), credential=b"x" * 32)
        for asked, kind in ((registry.ReportExit(exited), "NotProven"), (registry.Leave(leave), "NotProven")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asked
            assert remote_error(refused.value).kind == kind
        rooms = rooms_pb2_grpc.RoomServiceStub(channel)
        asked = rooms_pb2.OpenRoomRequest(request_id="after-it", prompt_tokens=5, tokens=9)
        opened = await rooms.OpenRoom(asked, timeout=CALL_S)
        assert opened.prefill.name == "prefill-0"
        assert len((await _drive(opened))[1]) == OUTPUT_TOKENS
        report = rooms_pb2.RoomReport(room=opened.room, outcome=rooms_pb2.Outcome(), key=opened.key)
        await rooms.ReportRooms(rooms_pb2.ReportRoomsRequest(reports=[report]), timeout=CALL_S)


async def _watch(rooms: rooms_pb2_grpc.RoomServiceStub, room: int) -> list[str]:
    """Return the names of the room's events until it is retired."""
    call = rooms.WatchRoom(rooms_pb2.WatchRoomRequest(room=room), timeout=CALL_S)
    return [event.name async for event in call]


async def _drive(opened: rooms_pb2.OpenRoomReply) -> tuple[int, list[int]]:
    """Run and stream the room. Returns prefill's first token, and all that decode sent."""
    request = inference_pb2.InferenceRequest(
        request_id="by-hand",
        prompt=PROMPT,
        max_tokens=OUTPUT_TOKENS,
        ignore_eos=True,
        sampling=inference_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
    )
    async with (
        grpc.aio.insecure_channel(opened.prefill.address) as to_prefill,
        grpc.aio.insecure_channel(opened.decode.address) as to_decode,
    ):
        run = inference_pb2_grpc.PrefillServiceStub(to_prefill).RunRoom(
            inference_pb2.RunRoomRequest(
                room=opened.room,
                incarnation=opened.prefill.incarnation,
                decode=opened.decode,
                request=request,
            ),
            timeout=CALL_S,
        )
        replies = aiter(run)
        accepted = await anext(replies)
        assert accepted.HasField("accepted")
        stream = inference_pb2_grpc.DecodeServiceStub(to_decode).StreamRoom(
            inference_pb2.StreamRoomRequest(
                room=opened.room,
                incarnation=opened.decode.incarnation,
                prefill=opened.prefill,
                request=request,
            ),
            timeout=CALL_S,
        )
        drawn = [
            token.token async for reply in stream if reply.HasField("tokens") for token in reply.tokens.tokens
        ]
        first = [reply.first_token.token.token async for reply in replies if reply.HasField("first_token")]
    return first[0], drawn
