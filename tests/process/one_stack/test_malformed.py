"""Tests that a real stack survives malformed gRPC messages: no process exits, the next answer is right, and
nothing is left."""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import grpc
import pytest
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from baton.wire.baton.v1 import inference_pb2, rooms_pb2, rooms_pb2_grpc, workers_pb2
from baton.wire.channel import REQUEST_BYTES_MAX
from tests.http import web
from tests.process.stack import Stack

CALL_S: Final = 20.0
SECRET: Final = "xyzzy plugh"
"""Text that is in prompts and must be nowhere else."""
SECRET_IDS: Final = (31415, 27182, 16180)
TOLD_IDS: Final = re.compile(rf"{SECRET_IDS[0]}\D{{1,20}}{SECRET_IDS[1]}")
"""Two of the secret ids in a row. A single number of five digits occurs in a log's ids, ports and times by
chance."""
ANSWERED: Final = frozenset(
    {
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OK,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Neither UNKNOWN nor INTERNAL: those are bugs of ours."""


def services(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield every method of a module's services with its path and descriptor."""
    for service in module.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            yield f"/{service.full_name}/{method.name}", method


BOOTSTRAP: Final = [*services(rooms_pb2), *services(workers_pb2)]
PREFILL: Final = [each for each in services(inference_pb2) if "DecodeService" not in each[0]]
DECODE: Final = [each for each in services(inference_pb2) if "DecodeService" in each[0]]


@asynccontextmanager
async def opened(stack: Stack) -> AsyncIterator[rooms_pb2.OpenRoomReply]:
    """Open a room that no caller drives, to learn the workers' addresses and processes. It is cancelled
    afterwards."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        rooms = rooms_pb2_grpc.RoomServiceStub(channel)
        asked = rooms_pb2.OpenRoomRequest(request_id="malformed", prompt_tokens=4, tokens=8)
        room = await rooms.OpenRoom(asked, timeout=CALL_S)
        try:
            yield room
        finally:
            request = rooms_pb2.CancelRoomRequest(room=room.room, key=room.key)
            await rooms.CancelRoom(request, timeout=CALL_S)


def targets(stack: Stack, room: rooms_pb2.OpenRoomReply) -> list[tuple[str, str, Any]]:
    """Return (address, path, descriptor) of every method of the stack."""
    bootstrap = f"127.0.0.1:{stack.grpc_port}"
    return [
        *((bootstrap, path, method) for path, method in BOOTSTRAP),
        *((room.prefill.address, path, method) for path, method in PREFILL),
        *((room.decode.address, path, method) for path, method in DECODE),
    ]


async def send(
    channel: grpc.aio.Channel, path: str, raw: bytes, *, timeout_s: float = CALL_S
) -> grpc.StatusCode:
    """Send raw bytes to a method of any kind, and read its replies to their end."""
    call = channel.unary_stream(path)(raw, timeout=timeout_s)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    code = await call.code()
    assert code in ANSWERED, f"{path}: {code} {await call.details()}"
    return code


def answer(stack: Stack) -> str:
    """Return the stack's answer to a client."""
    model = web().get(f"{stack.url}/v1/models", timeout=CALL_S).json()["data"][0]["id"]
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    reply = web().post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


@pytest.fixture
def unharmed(idle_stack: Stack) -> Iterator[Stack]:
    """Check afterwards that the same processes give the same answer and have nothing of a prompt in their
    logs."""
    before = answer(idle_stack)
    pids = {name: service.process.pid for name, service in idle_stack.services.items()}
    yield idle_stack
    assert answer(idle_stack) == before
    for name, service in idle_stack.services.items():
        assert service.process.poll() is None, service.tail()
        assert service.process.pid == pids[name]
        said = service.log.read_text(errors="replace")
        assert "Traceback" not in said, service.tail()
        assert SECRET not in said
        assert not TOLD_IDS.search(said)


def test_ids_of_a_prompt_are_found_however_a_message_is_told_and_not_in_an_id() -> None:
    request = inference_pb2.InferenceRequest(prompt=SECRET_IDS)
    for told in (str(request), repr(SECRET_IDS), str(list(SECRET_IDS)), MessageToJson(request)):
        assert TOLD_IDS.search(told)
    assert not TOLD_IDS.search("request_id=8ef2cda3f331415a692608df6761abd duration_ms=31415.271")


def garbage() -> list[bytes]:
    """Return byte strings that are no messages or cut-off ones. They are the same in every run."""
    draw = random.Random(7)
    whole = inference_pb2.StreamRoomRequest(
        room=7, prefill=rooms_pb2.Peer(name=SECRET), request=inference_pb2.InferenceRequest(prompt=SECRET_IDS)
    ).SerializeToString()
    return [
        b"",
        b"\0",
        b"\xff" * 64,
        b"\x0a\xff\xff\xff\xff\x0f",  # a field of 4 GB
        b"\x0b" * 1000,  # groups within groups
        b"\x0a\x02\xff\xfe",  # text that is no UTF-8
        *(draw.randbytes(length) for length in (1, 7, 100, 5000)),
        *(whole[:cut] for cut in range(1, len(whole), 7)),
    ]


async def test_bytes_that_are_no_message_end_their_own_call(unharmed: Stack) -> None:
    async with opened(unharmed) as room:
        for address, path, _ in targets(unharmed, room):
            async with grpc.aio.insecure_channel(address) as channel:
                codes = await asyncio.gather(*(send(channel, path, raw, timeout_s=8) for raw in garbage()))
            assert grpc.StatusCode.OK not in codes[2:3], f"{path} took noise for a message"


def filled(method: Any, room: rooms_pb2.OpenRoomReply, draw: random.Random) -> Message:
    """Return a message of the right shape for the right process, with random content otherwise."""
    from google.protobuf.message_factory import GetMessageClass

    message = GetMessageClass(method.input_type)()
    _fill(message, draw)
    here = room.decode if method.containing_service.name == "DecodeService" else room.prefill
    if "incarnation" in message.DESCRIPTOR.fields_by_name and method.containing_service.name.endswith(
        ("PrefillService", "DecodeService", "HandoverService")
    ):
        message.incarnation = here.incarnation  # type: ignore[attr-defined]
    if "room" in message.DESCRIPTOR.fields_by_name and draw.random() < 0.5:
        message.room = draw.choice([1, 2**64 - 1, room.room + 1000])  # type: ignore[attr-defined]
    return message


def _is_map(field: Any) -> bool:
    return bool(field.message_type.GetOptions().map_entry)


def _fill_map(held: Any, field: Any, draw: random.Random, numbers: Sequence[int]) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    names = ("", SECRET, "x" * 300) if key.cpp_type == key.CPPTYPE_STRING else numbers
    fractional = value.cpp_type in (value.CPPTYPE_DOUBLE, value.CPPTYPE_FLOAT)
    held[draw.choice(names)] = draw.choice([0.0, float("nan")] if fractional else numbers)


def _fill(message: Message, draw: random.Random) -> None:
    numbers = (0, 1, 2, 7, 2**31 - 1)
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.3:
            continue
        values: list[Any] = []
        for _ in range(draw.choice([1, 3]) if field.is_repeated else 1):
            match field.cpp_type:
                case field.CPPTYPE_MESSAGE if _is_map(field):
                    _fill_map(getattr(message, field.name), field, draw, numbers)
                case field.CPPTYPE_MESSAGE:
                    part = getattr(message, field.name)
                    _fill(part.add() if field.is_repeated else part, draw)
                case field.CPPTYPE_STRING if field.type == field.TYPE_BYTES:
                    values.append(draw.randbytes(draw.choice([0, 1, 200])))
                case field.CPPTYPE_STRING:
                    values.append(draw.choice(["", SECRET, "\0", "127.0.0.1:1", "x" * 300]))
                case field.CPPTYPE_BOOL:
                    values.append(draw.random() < 0.5)
                case field.CPPTYPE_DOUBLE | field.CPPTYPE_FLOAT:
                    values.append(draw.choice([0.0, 1.0, -1.0, float("nan"), float("inf"), 1e308]))
                case _:
                    values.append(draw.choice(numbers))
        if field.is_repeated and values:
            getattr(message, field.name).extend(values)
        elif values:
            setattr(message, field.name, values[0])


@pytest.mark.parametrize("seed", range(3))
async def test_messages_of_nonsense_end_their_own_call(unharmed: Stack, seed: int) -> None:
    draw = random.Random(seed)
    async with opened(unharmed) as room:
        for address, path, method in targets(unharmed, room):
            if method.name in ("OpenRoom", "Leave", "Drain"):
                continue  # what these name by chance is served, rightly
            raws = [filled(method, room, draw).SerializeToString() for _ in range(12)]
            async with grpc.aio.insecure_channel(address) as channel:
                await asyncio.gather(*(send(channel, path, raw, timeout_s=8) for raw in raws))


async def test_methods_that_are_not_there_are_refused(unharmed: Stack) -> None:
    async with opened(unharmed) as room:
        for address in (f"127.0.0.1:{unharmed.grpc_port}", room.prefill.address, room.decode.address):
            async with grpc.aio.insecure_channel(address) as channel:
                for path in (
                    "/baton.v1.RoomService/Nope",
                    "/baton.v2.RoomService/OpenRoom",
                    "/x",
                    "/\u00e9/y",
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await channel.unary_unary(path)(b"", timeout=CALL_S)
                    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def long_request(kind: type[Any], length: int, incarnation: int) -> bytes:
    """A request of a right shape with as many prompt tokens as make `length` bytes."""

    def sent(tokens: int) -> bytes:
        sampling = inference_pb2.Sampling(top_p=1, repetition_penalty=1)
        request = inference_pb2.InferenceRequest(prompt=[7] * tokens, max_tokens=1, sampling=sampling)
        raw: bytes = kind(room=2**63, incarnation=incarnation, request=request).SerializeToString()
        return raw

    tokens = length - 64
    return sent(tokens + length - len(sent(tokens)))


@pytest.mark.parametrize("over", [-64, 1, 56 << 20], ids=["below", "above", "far above"])
async def test_the_longest_message_and_more_are_refused(unharmed: Stack, over: int) -> None:
    """The longest message that the wire carries takes as long as any turn."""
    limits = [("grpc.max_send_message_length", -1)]
    async with opened(unharmed) as room:
        for peer, path, kind in (
            (room.prefill, PREFILL[0][0], inference_pb2.RunRoomRequest),
            (room.decode, DECODE[0][0], inference_pb2.StreamRoomRequest),
        ):
            length = REQUEST_BYTES_MAX + over
            raw = long_request(kind, length, peer.incarnation) if over <= 1 else bytes(length)
            assert len(raw) == length
            async with grpc.aio.insecure_channel(peer.address, options=limits) as channel:
                code = await send(channel, path, raw)
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


async def test_a_caller_that_cuts_its_connection_in_a_message_harms_nobody(unharmed: Stack) -> None:
    """HTTP/2 by hand: a frame that promises more than comes."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    pieces = [
        b"",
        preface[:10],
        preface,
        preface + b"\0\0\0\4\0\0\0\0\0" + b"\0\xff\xff\0\0\0\0\0\1",
        preface + b"\xff" * 64,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        random.Random(7).randbytes(4096),
    ]
    async with opened(unharmed) as room:
        for address in (f"127.0.0.1:{unharmed.grpc_port}", room.prefill.address, room.decode.address):
            host, _, port = address.rpartition(":")
            for piece in pieces:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(piece)
                await writer.drain()
                writer.close()
