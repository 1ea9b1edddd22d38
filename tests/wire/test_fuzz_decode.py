"""Random tests that commands to a decode worker, and writes into its slots, end at most the named rooms, and
leave nothing."""

import asyncio
from dataclasses import replace
from math import inf, nan
from typing import Any, Final

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from baton.ids import Generation, Incarnation, RoomId
from baton.pages.record import ALTERNATIVES_MAX, SEAL_OFFSET, SLOT_BYTES, MetadataRecord
from baton.rooms.errors import PeerFault, Reason, Refusal
from baton.rooms.request import Request, Sampling
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.conversions import token_from_wire
from tests.decode.bench import DecodeBench, decoding
from tests.prefill import toy
from tests.prefill.bench import DECODE, PREFILL
from tests.wire.fuzz import computable, messages, unsigned

GOOD: Final = RoomId(7)
OTHER: Final = Incarnation(33)
"""Another prefill worker, in whose name the fuzzed commands speak."""
ASKED: Final = toy.request(str(GOOD), tuple(range(100, 110)), max_tokens=4)
NOWHERE: Final = "127.0.0.1:1"
HERE: Final = "here"
"""Stands for the scripted sender's address."""

PROCESSES = st.sampled_from([PREFILL, OTHER, OTHER + 1, DECODE])
LIKELY = {
    **computable(toy.VOCABULARY),
    "prompt": st.lists(st.integers(0, toy.VOCABULARY - 1), min_size=1, max_size=8),
    "max_tokens": st.integers(4, 6),  # so that there are pages for every place at once
    "room": st.sampled_from([GOOD, GOOD + 1, GOOD ^ (1 << 63), 2]),
    "incarnation": PROCESSES,
    "receiver": PROCESSES,
    "generation": st.integers(0, 4) | unsigned(64),
    "choice": st.integers(0, 5),
    "departed": PROCESSES,
    "connected": PROCESSES,
    "reason": st.sampled_from([each.value for each in Reason]),
    "Peer.name": st.just("prefill-1"),
    "Peer.incarnation": PROCESSES,
    "Peer.address": st.sampled_from([HERE, NOWHERE]),
}
KINDS = {
    "stream": inference_pb2.StreamRoomRequest,
    "cancel": inference_pb2.CancelRequest,
    "quiet": inference_pb2.CloseRequest,
    "end_choice": inference_pb2.EndChoiceRequest,
}


@st.composite
def commands(draw: st.DrawFn) -> group_pb2.Command:
    kind = draw(st.sampled_from([*KINDS, "stream", "any"]))
    if kind == "any":
        return draw(messages(group_pb2.Command, LIKELY))
    return group_pb2.Command(**{kind: draw(messages(KINDS[kind], LIKELY))})


def disown(command: group_pb2.Command, address: str) -> None:
    """Make a command that acts for the good room, or for its sender, act for another one."""
    kind = command.WhichOneof("what")
    message: Any = getattr(command, kind) if kind else None
    match kind:
        case "stream":
            if command.stream.prefill.incarnation == PREFILL:
                command.stream.prefill.incarnation = OTHER
            if command.stream.prefill.address == HERE:
                command.stream.prefill.address = address
            command.stream.request.request_id = str(command.stream.room)  # the toy model's mark
        case "quiet" if command.quiet.room == GOOD:
            command.quiet.generation |= 1 << 40
        case "departed" if command.departed == PREFILL:
            command.departed = OTHER
        case _ if getattr(message, "room", None) == GOOD:  # any other command that names a room
            message.room = GOOD + 1


async def give(bench: DecodeBench, command: group_pb2.Command) -> None:
    disown(command, bench.address)
    kind = command.WhichOneof("what")
    try:
        await bench.enter(command)
    except (Refusal, PeerFault) as error:
        event(f"{kind}: {type(error).__name__}")
    else:
        event(f"{kind}: taken")


async def play(before: list[group_pb2.Command], after: list[group_pb2.Command]) -> None:
    """Run the good room with commands before and after its memory is exposed."""
    async with decoding() as bench:
        bench.sender.quiet.set()
        bench.sender.may_connect.clear()
        caller = await bench.stream(ASKED)
        for command in before:
            await give(bench, command)
        bench.sender.may_connect.set()
        await bench.granted(GOOD)
        for command in after:
            if command.WhichOneof("what") != "revoke":  # which ends what is exposed, rightly
                await give(bench, command)
        bench.land(ASKED)
        await bench.turns_until(caller.task.done)
        assert await caller.outcome() == ""
        assert caller.tokens == toy.answer(ASKED)
        for room in bench.work.roster:
            await bench.cancel(room.id)
            # Some are told to write by an address where nobody answers a close.
            await bench.enter(group_pb2.Command(departed=room.peer))
        await bench.settle()
        bench.assert_empty()


SEVERAL = st.lists(commands(), max_size=6)


@settings(max_examples=settings().max_examples // 4)
@example(before=[group_pb2.Command(compute_here=group_pb2.ComputeHere(room=GOOD))], after=[])
@given(SEVERAL, SEVERAL)
def test_commands_end_at_most_their_own_rooms(
    before: list[group_pb2.Command], after: list[group_pb2.Command]
) -> None:
    asyncio.run(play(before, after))


SMALL = st.integers(0, 12)
TOKENS = st.one_of([st.integers(0, toy.VOCABULARY - 1)] * 5 + [st.integers(0, 2**32 - 1)])
LOGPROBS = st.one_of([st.floats(max_value=0, width=32)] * 5 + [st.floats(width=32)])


TRUTH = MetadataRecord(
    GOOD,
    Generation(1),
    len(ASKED.prompt),
    0,
    toy.LAYOUT.pages_for(len(ASKED.prompt)),
    toy.answer(ASKED)[0],
    -0.5,
)


@st.composite
def lies(draw: st.DrawFn) -> MetadataRecord:
    """Records of a sender that computes nonsense: they fit, and their checksum holds."""
    several = st.lists(st.tuples(TOKENS, LOGPROBS), max_size=ALTERNATIVES_MAX).map(tuple)
    logprob, first = draw(st.none() | LOGPROBS | LOGPROBS), draw(TOKENS)
    alternatives = () if logprob is None else draw(several)
    lie = replace(TRUTH, first_token=first, first_logprob=logprob, alternatives=alternatives)
    if draw(st.booleans()):
        return lie
    return replace(
        lie,
        room=RoomId(draw(st.integers(GOOD, GOOD + 1))),
        generation=Generation(draw(st.integers(1, 2))),
        prompt_tokens=draw(SMALL),
        cached_tokens=draw(SMALL),
        pages=draw(st.lists(SMALL, max_size=2).map(tuple)),
    )


async def tell(lie: MetadataRecord) -> None:
    request = Request(
        str(GOOD), ASKED.prompt, ASKED.max_tokens, sampling=Sampling(temperature=0.0, top_logprobs=2)
    )
    async with decoding() as bench:
        bench.sender.quiet.set()
        caller = await bench.stream(request)
        grant = await bench.granted(GOOD)
        bench.land(request)
        start = grant.slot * SLOT_BYTES
        bench.slots.view[start : start + SEAL_OFFSET] = lie.pack()
        await bench.turns_until(caller.task.done)
        outcome = await caller.outcome()
        event(outcome or "answered")
        assert outcome in ("", Reason.RECORD_CORRUPT.value)
        told = [token for reply in caller.replies for token in reply.tokens.tokens]
        for token in map(token_from_wire, told):
            shown = [token.id, *(each for each, _ in token.top)]
            assert all(each < toy.VOCABULARY for each in shown), "no client can be shown another"
        await bench.settle()
        bench.assert_empty()


@settings(max_examples=settings().max_examples // 2)
@example(lie=replace(TRUTH, alternatives=((toy.VOCABULARY, -1.0),)))
@example(lie=replace(TRUTH, alternatives=((1, nan),)))
@example(lie=replace(TRUTH, first_logprob=inf))
@given(lies())
def test_a_record_of_nonsense_ends_its_room_or_can_be_shown(lie: MetadataRecord) -> None:
    asyncio.run(tell(lie))
