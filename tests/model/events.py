"""What can happen next?

Each event is one atomic deed: one turn of a worker, one message that arrives, one write that lands, one
trouble. `after` yields every one of a state, with the state that it leads to.
"""

from collections.abc import Iterator
from functools import partial

from services.rooms.ids import RoomId
from services.rooms.phases import LIVE
from tests.model.flights import Flight
from tests.model.laws import Broken
from tests.model.registry import issue
from tests.model.troubles import Label, Possible, Steps, troubles
from tests.model.turns import acknowledge, ask_close, can_acknowledge, deliver, turn
from tests.model.world import DECODE, PREFILL, WANTED, Known, State, World, one_rank


def after(world: World, state: State) -> Iterator[tuple[Label, State | Broken, bool]]:
    """(label, next state, whether it is no trouble) of every event that changes something; where a law
    breaks, Broken stands in place of the next state."""
    for possible in (_ordinary, troubles):
        for label, make, usual in possible(world, state):
            try:
                following = make()
                if following != state:
                    world.check(following)
            except Broken as broken:
                yield label, broken, usual
            else:
                if following != state:
                    yield label, following, usual


def _ordinary(world: World, state: State) -> Iterator[Possible]:
    still = True
    for label, make in _moving(world, state):
        still = still and label[0] == "issue"
        yield label, make, True
    for side in (PREFILL, DECODE):
        yield ("turn", side, None), partial(turn, world, state, side), True
    if still:
        yield from _patience(world, state)


def _moving(world: World, state: State) -> Steps:
    """What happens outside of turns."""
    for index, entry in enumerate(state.rooms):
        if entry.known is not Known.OVER and not world.scope.overlap:
            if entry.known is Known.UNISSUED:
                yield ("issue", RoomId(index + 1)), partial(issue, state, RoomId(index + 1))
            break
        if entry.known is Known.UNISSUED:
            yield ("issue", RoomId(index + 1)), partial(issue, state, RoomId(index + 1))
            break
    for message in state.mail:
        yield ("deliver", message), partial(deliver, world, state, message)
    for close in state.closes:
        asked_of = state.rooms[close.room - 1].peers[PREFILL]
        if close.asked == WANTED and asked_of == state.peers[PREFILL]:
            yield ("ask close", close), partial(ask_close, world, state, close)
        elif can_acknowledge(world, state, close):
            yield ("acknowledge", close), partial(acknowledge, world, state, close)
    for rank, pair in enumerate(state.pairs):
        yield from _alone(world, state, rank, pair)


def _alone(world: World, state: State, rank: int, pair: tuple[int, int]) -> Steps:
    """What happens to one pair of ranks alone."""
    here = world.standing(PREFILL, pair[PREFILL])
    for flight in here.flying:
        if flight.peer == state.peers[DECODE]:
            yield ("land", rank, flight), partial(_land, world, state, rank, flight)
        elif here.at(flight.room) is not None:
            fails = ("put_failed", flight.number)
            yield ("put fails", rank, flight), partial(one_rank, world, state, PREFILL, rank, fails)
    for side in (PREFILL, DECODE):
        if world.standing(side, pair[side]).stepping:
            ends = ("step_ends",)
            yield ("step ends", side, rank), partial(one_rank, world, state, side, rank, ends)


def _land(world: World, state: State, rank: int, flight: Flight) -> State:
    state = one_rank(world, state, PREFILL, rank, ("landed", flight.number))
    return one_rank(world, state, DECODE, rank, ("land", flight))


def _patience(world: World, state: State) -> Iterator[Possible]:
    """Nothing moves: whatever deadline runs, it passes."""
    for side in (PREFILL, DECODE):
        for rank, standing in enumerate(world.standings(state, side)):
            for room, at in standing.rooms.items():
                if at.phase in LIVE:
                    late = (rank, room)
                    yield ("turn", side, late), partial(turn, world, state, side, late), True
