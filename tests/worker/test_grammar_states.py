"""Tests that a room waits for its grammar to be compiled, no longer than that, and for nothing else."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from baton.engine_interface import Sequence
from baton.grammars.grammar_cache import GrammarCache
from baton.ids import Generation, Incarnation, RoomId
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Reason
from baton.rooms.evidence import Connected, Granted, Landed, Sealed
from baton.rooms.phases import Phase, Vote
from baton.rooms.receiver import Receiver
from baton.rooms.request import Request
from baton.rooms.room import NOT_COMPILED, Room
from baton.rooms.sender import Sender
from baton.worker.grammar_states import GrammarStates
from tests.grammars.answers import Slow, ids, regex, request
from tests.pages.ids import page_ids

DEADLINES = Deadlines(1_000, 1_000, 1_000, 1_000, 1_000)
DIGITS = regex("[0-9]{2,3}")


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.go.set()


@pytest.fixture
def folds(slow: Slow) -> GrammarStates:
    return GrammarStates(GrammarCache(slow), asyncio.Event().set)


def sender(folds: GrammarStates, asked: Request) -> Sender:
    made = Sender(
        RoomId(7), "r", Incarnation(2), 0, (1,), DEADLINES, 0, 20_000, compiled=not folds.needs(asked)
    )
    made.note(Granted(Generation(3), (page_ids(1),), 0))
    return made


def receiver(folds: GrammarStates, asked: Request) -> Receiver:
    made = Receiver(
        RoomId(7), "r", Incarnation(2), 0, (1,), DEADLINES, 0, 20_000, compiled=not folds.needs(asked),
        pages_expected=(1,),
    )  # fmt: skip
    made.note(Connected())
    for _ in range(2):
        made.settle(made.vote(1, has_capacity=True), 1)
    made.expose(Generation(3), (0,))
    made.note(Landed(Generation(3), (1,)))
    made.note(Sealed(Generation(3)))
    return made


SIDES = {"prefill": (sender, Phase.BOOTSTRAPPING), "decode": (receiver, Phase.TRANSFERRING)}


async def compiled(folds: GrammarStates) -> None:
    async with asyncio.timeout(20):
        while len(folds):
            folds.observe()
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("side", SIDES)
async def test_no_room_draws_before_its_grammar_is_compiled(
    folds: GrammarStates, slow: Slow, side: str
) -> None:
    """The room's phase and vote are those of each side's last moment before a draw."""
    make, phase = SIDES[side]
    asked = request(grammar=DIGITS)
    room: Room = make(folds, asked)
    sequence = Sequence(asked, [])
    folds.begin(room, sequence)
    assert (room.phase, room.vote(1, has_capacity=True)) == (phase, Vote.STAY)
    assert not folds.observe()
    late = room.ending(30_000)
    assert late is not None
    assert late.reason is Reason.DEADLINE
    assert NOT_COMPILED in late.text
    slow.go.set()
    await compiled(folds)
    assert sequence.fold is not None
    assert room.vote(1, has_capacity=True) is Vote.ADVANCE


@pytest.mark.parametrize("make", [sender, receiver])
async def test_a_room_without_a_grammar_and_one_of_a_rank_that_does_not_draw_wait_for_none(
    slow: Slow, make: Callable[[GrammarStates, Request], Room]
) -> None:
    for shelf, asked in ((GrammarCache(slow), request()), (None, request(grammar=DIGITS))):
        folds = GrammarStates(shelf, asyncio.Event().set)
        room = make(folds, asked)
        folds.begin(room, Sequence(asked, []))
        assert len(folds) == 0
        assert room.vote(1, has_capacity=True) is Vote.ADVANCE


async def test_each_choice_has_a_fold_of_its_own(folds: GrammarStates, slow: Slow) -> None:
    slow.go.set()
    asked = request(grammar=DIGITS)
    room, choices = receiver(folds, asked), [Sequence(asked, []) for _ in range(3)]
    folds.begin(room, *choices)
    await compiled(folds)
    assert len({id(each.fold) for each in choices}) == 3
    assert None not in [each.fold for each in choices]
    assert room.vote(1, has_capacity=True) is Vote.ADVANCE


async def test_a_compiled_grammar_wakes_the_turns(slow: Slow) -> None:
    woken = asyncio.Event()
    folds = GrammarStates(GrammarCache(slow), woken.set)
    asked = request(grammar=DIGITS)
    folds.begin(sender(folds, asked), Sequence(asked, []))
    slow.go.set()
    await asyncio.wait_for(woken.wait(), 20)
    assert folds.observe()


@pytest.mark.parametrize(("text", "output"), [("(", ""), ("[0-9]+", "fox")])
async def test_what_is_not_compiled_here_ends_its_room_and_nothing_of_it_is_told(
    folds: GrammarStates, slow: Slow, text: str, output: str
) -> None:
    """The bootstrap has compiled this grammar, and the worker is of another version."""
    slow.go.set()
    asked = request(grammar=regex(text), output=tuple(ids(output)))
    room = sender(folds, asked)
    folds.begin(room, Sequence(asked, ids(output)))
    await compiled(folds)
    assert room.cause is not None
    assert room.cause.reason is Reason.GRAMMAR_FAILED
    assert not any(each in room.cause.text for each in (text, "fox"))
    assert room.vote(1, has_capacity=True) is Vote.ABORT


async def test_a_room_that_is_over_is_forgotten(folds: GrammarStates, slow: Slow) -> None:
    asked = request(grammar=DIGITS)
    folds.begin(sender(folds, asked), Sequence(asked, []))
    folds.forget(RoomId(7))
    folds.forget(RoomId(7))
    assert len(folds) == 0
    slow.go.set()
    assert not folds.observe()
