"""Random tests that commands to a prefill worker end at most their own rooms, and leave nothing. One good
room runs beside them. No command names its receiver rightly."""

import asyncio
import struct
from collections.abc import Callable
from typing import Final

from hypothesis import event, given, settings
from hypothesis import strategies as st

from baton.decode.prefill_peers import endpoint_to_wire
from baton.ids import Incarnation, RoomId
from baton.pages.errors import LayoutMismatch, Truncated
from baton.pages.record import SCHEMA_HASH, SLOT_BYTES
from baton.prefill.routes import endpoint_from_wire
from baton.rooms.errors import PeerFault, Reason, Refusal
from baton.testing.memory_fabric import MemoryFabric
from baton.transfer.bounds import check_endpoint
from baton.transfer.transfer_protocol import TransferError, kv_region
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.layout_messages import layout_to_wire
from tests.prefill import toy
from tests.prefill.bench import DECODE, PAGES, PLACES, PrefillBench, Receiver, connect_request
from tests.wire.fuzz import computable, messages, unsigned

GOOD: Final = 7
OTHER: Final = Incarnation(33)
"""Another decode worker, in whose name the fuzzed commands speak."""
PROMPT: Final = tuple(range(100, 110))
GRANTED: Final = (9, 2, 3)
SLOT: Final = 1
ANSWERED: Final = (Refusal, PeerFault, Truncated, LayoutMismatch)
"""Errors that a caller gets as an answer. Any other error is a bug and ends the worker."""
TURNS_MAX: Final = 600

ROOMS = st.sampled_from([GOOD, GOOD + 1, GOOD ^ (1 << 63), 2])
PROCESSES = st.sampled_from([DECODE, OTHER, OTHER + 1, 0])
LIKELY = {
    "room": ROOMS,
    "receiver": PROCESSES,
    "generation": st.sampled_from([5, 6, 0]) | unsigned(64),
    "exposure": PROCESSES,
    "departed": PROCESSES,
    "connected": PROCESSES,
    **computable(toy.VOCABULARY),
    "PageTable.pages": st.lists(st.integers(0, PAGES + 1), max_size=6) | st.lists(unsigned(32), max_size=6),
    "slot": st.integers(0, PLACES + 1),
    "prefix_tokens": st.sampled_from([0, 4, 8, 3]) | unsigned(32),
    "reason": st.sampled_from([each.value for each in Reason]),
    "schema": st.just(SCHEMA_HASH),
    "kv_checksum": st.just(""),
    "layouts": st.lists(st.just(layout_to_wire(toy.LAYOUT)), max_size=2),
    "Peer.name": st.just("decode-1"),
    "Peer.incarnation": PROCESSES,
    "Peer.address": st.just("127.0.0.1:1"),
    "Endpoint.incarnation": PROCESSES,
    "Endpoint.agent": st.sampled_from([f"memory-{DECODE:016x}", f"memory-{OTHER:016x}"]),
    "Endpoint.metadata": st.just(b"memory"),
    "Region.name": st.sampled_from([kv_region(0), "slots"]),
    "Region.device": st.sampled_from(["cpu", "cuda:0"]),
}
KINDS = {
    "run": inference_pb2.RunRoomRequest,
    "grant": inference_pb2.GrantRequest,
    "connect": inference_pb2.ConnectRequest,
    "close": inference_pb2.CloseRequest,
    "cancel": inference_pb2.CancelRequest,
}
Step = tuple[group_pb2.Command, Incarnation | None]
"""A command. With an incarnation, a connect shows that one's true endpoint, and a grant fits its room."""


@st.composite
def steps(draw: st.DrawFn) -> Step:
    kind = draw(st.sampled_from([*KINDS, "connect", "any"]))
    shown = draw(st.sampled_from([None, OTHER, DECODE]))
    if kind == "any":
        return draw(messages(group_pb2.Command, LIKELY)), shown
    return group_pb2.Command(**{kind: draw(messages(KINDS[kind], LIKELY))}), shown


def disown(command: group_pb2.Command) -> None:
    """Make a command that acts for the good room, or for its receiver, act for another one."""
    match command.WhichOneof("what"):
        case "run" if command.run.decode.incarnation == DECODE:
            command.run.decode.incarnation = OTHER
        case "grant" if command.grant.receiver == DECODE:
            command.grant.receiver = OTHER
        case "close" if command.close.receiver == DECODE:
            command.close.receiver = OTHER
        case "cancel" if command.cancel.room == GOOD:
            command.cancel.room = GOOD + 1
        case "departed" if command.departed == DECODE:
            command.departed = OTHER
        case "connect" if command.connect.receiver == DECODE and _well_formed(command.connect):
            command.connect.receiver = OTHER
    if command.WhichOneof("what") == "run":
        command.run.request.request_id = str(command.run.room)  # the toy model's mark


def improve(bench: PrefillBench, command: group_pb2.Command, shown: Receiver) -> None:
    """Make it what an honest peer could say, but for what `disown` then changes."""
    if command.HasField("connect"):
        del command.connect.endpoints[:]
        command.connect.endpoints.append(endpoint_to_wire(shown.endpoint))
        del command.connect.layouts[1:]
    elif command.HasField("grant") and RoomId(command.grant.room) in bench.work.roster:
        grant, sender = command.grant, bench.work.roster.get(RoomId(command.grant.room))
        grant.prefix_tokens -= grant.prefix_tokens % toy.PAGE_TOKENS
        grant.receiver = grant.exposure = sender.peer
        count = max(sender.pages_needed[0] - grant.prefix_tokens // toy.PAGE_TOKENS, 0)
        table = [*(page for each in grant.pages for page in each.pages), *range(PAGES)][:count]
        del grant.pages[:]
        grant.pages.add(pages=table)


def _well_formed(connect: inference_pb2.ConnectRequest) -> bool:
    try:
        for endpoint in connect.endpoints:
            check_endpoint(endpoint_from_wire(endpoint))
    except TransferError:
        return False
    return True


async def give(bench: PrefillBench, command: group_pb2.Command) -> None:
    try:
        await bench.enter(command)
    except ANSWERED as error:
        event(f"{command.WhichOneof('what')}: {type(error).__name__}")
    else:
        event(f"{command.WhichOneof('what')}: taken")


async def play(before: list[Step], after: list[Step]) -> None:
    """Run the good room with commands before and after it is told where to write."""
    fabric = MemoryFabric()
    receivers = {DECODE: Receiver(fabric), OTHER: Receiver(fabric, OTHER)}
    bench = PrefillBench(fabric)
    try:
        bench.connect(receivers[DECODE])
        await bench.enter(group_pb2.Command(connect=anothers_connect(receivers[OTHER])))
        caller = await bench.run(toy.request(str(GOOD), PROMPT))
        for number, (command, shown) in enumerate((*before, *after)):
            if number == len(before):
                await bench.grant(GOOD, GRANTED, slot=SLOT)
            if shown is not None:
                improve(bench, command, receivers[shown])
            disown(command)
            await give(bench, command)
        if not after:
            await bench.grant(GOOD, GRANTED, slot=SLOT)
        await turn_until(bench, caller.task.done)
        assert await caller.outcome() == ""
        handed_over(receivers[DECODE])
        await end_the_rest(bench)
        handed_over(receivers[DECODE])
        bench.assert_empty()
    finally:
        bench.close()
        for receiver in receivers.values():
            receiver.transfer.close()


def anothers_connect(receiver: Receiver) -> inference_pb2.ConnectRequest:
    connect = connect_request(receiver)
    connect.receiver = receiver.endpoint.incarnation
    return connect


def handed_over(receiver: Receiver) -> None:
    """Check that the receiver got the good room's pages and record, and not a byte more."""
    for position, token in enumerate(PROMPT):
        page, place = GRANTED[position // toy.PAGE_TOKENS], position % toy.PAGE_TOKENS
        at = place * toy.GROUP.token_bytes
        assert struct.unpack_from("<QQ", receiver.page(page), at) == (GOOD, token)
    for page in set(range(PAGES)) - set(GRANTED):
        assert receiver.page(page) == bytes(toy.GROUP.page_bytes), "nobody was told to write here"
    record = receiver.record(SLOT, GOOD, 5)
    assert record is not None
    assert record.first_token == toy.next_token(PROMPT)
    slots = bytes(receiver.slots.view)
    assert not any(slots[: SLOT * SLOT_BYTES] + slots[(SLOT + 1) * SLOT_BYTES :])


async def turn_until(bench: PrefillBench, holds: Callable[[], bool]) -> None:
    for _ in range(TURNS_MAX):
        if holds():
            return
        if not bench.step_thread.free:
            await bench.step_end()
        await bench.turn()
    raise AssertionError(f"rooms are left: {bench.work.roster.census()}")


async def end_the_rest(bench: PrefillBench) -> None:
    for room in bench.work.roster:
        await bench.cancel(room.id)
    await turn_until(bench, lambda: not len(bench.work.roster))


SEVERAL = st.lists(steps(), max_size=8)


@settings(max_examples=settings().max_examples // 2)
@given(SEVERAL, SEVERAL)
def test_commands_end_at_most_their_own_rooms(before: list[Step], after: list[Step]) -> None:
    asyncio.run(play(before, after))
