"""What can happen next?

Each event is one atomic deed: one turn of a worker, one message that arrives, one write that lands, one
trouble. `after` yields every one of a state, with the state that it leads to.
"""

from collections.abc import Iterator
from functools import partial

from services.rooms.ids import RoomId
from services.rooms.phases import LIVE
from services.transfer.interface import PutState
from tests.model.flights import RECORD, Flight, exposed_by, rank_of
from tests.model.handover import acknowledge, can_acknowledge
from tests.model.laws import Broken
from tests.model.registry import abandoned, issue, joined, untold
from tests.model.troubles import (
    Label,
    Possible,
    Steps,
    alive,
    awake,
    is_missed,
    lease_ends,
    misses,
    revokable,
    revoke,
    silence,
    troubles,
    waits,
)
from tests.model.turns import ask_close, catch_up, deliver, turn
from tests.model.world import DECODE, PREFILL, WANTED, Known, State, World, one_rank


def after(world: World, state: State) -> Iterator[tuple[Label, State | Broken, bool]]:
    """(label, next state, whether it is no trouble) of every event that changes something; where a law
    breaks, Broken stands in place of the next state."""
    landing = [] if world.scope.late_records else list(_records(world, state))
    for possible in (lambda *_: landing,) if landing else (_ordinary, troubles):
        for label, make, usual in possible(world, state):
            try:
                following = make()
                if following is state or following == state:
                    continue
                world.check(following)
            except Broken as broken:
                yield label, broken, usual
            else:
                yield label, following, usual


def _ordinary(world: World, state: State) -> Iterator[Possible]:
    still = True
    for label, make in _moving(world, state):
        still = still and label[0] == "issue"
        yield label, make, True
    for side in awake(state):
        yield ("turn", side, None), partial(turn, world, state, side), True
    if still:
        yield from _patience(world, state)


def _moving(world: World, state: State) -> Steps:
    """What happens outside of turns."""
    yield from _issuing(world, state)
    if state.lag is not None:
        yield ("catch up", *state.lag[:2]), partial(catch_up, world, state)
    yield from _arriving(world, state)
    if state.stalled:
        if lease_ends(world, state):
            yield ("silence",), partial(silence, world, state)
    else:
        yield from _closing(world, state)
    if world.scope.registry:
        yield from _registering(world, state)
    for rank in range(len(state.senders)):
        yield from _flying(world, state, rank)
    for side in alive(state):
        for rank, standing in enumerate(world.standings(state, side)):
            if standing.stepping:
                ends = ("step_ends",)
                yield ("step ends", side, rank), partial(one_rank, world, state, side, rank, ends)


def _arriving(world: World, state: State) -> Steps:
    for message in state.mail:
        if waits(state, message[0]):
            continue
        if state.stalled and message[0] == PREFILL:
            if is_missed(world, state, message):
                yield ("miss", message), partial(misses, world, state, message)
        else:
            yield ("deliver", message), partial(deliver, world, state, message)


def _issuing(world: World, state: State) -> Steps:
    if state.stalled or state.draining is not None:
        return
    for index, entry in enumerate(state.rooms):
        if entry.known is Known.UNISSUED:
            yield ("issue", RoomId(index + 1)), partial(issue, world, state, RoomId(index + 1))
            break
        if entry.known is not Known.OVER and not world.scope.overlap:
            break


def _closing(world: World, state: State) -> Steps:
    for close in state.closes:
        asked_of = state.rooms[close.room - 1].peers[PREFILL]
        if close.asked == WANTED and asked_of == state.peers[PREFILL] and not waits(state, PREFILL):
            yield ("ask close", close), partial(ask_close, world, state, close)
        elif can_acknowledge(world, state, close):
            yield ("acknowledge", close), partial(acknowledge, world, state, close)


def _registering(world: World, state: State) -> Steps:
    """Who lost its lease gets one again; who is to leave, and is waited for by nobody, is told so."""
    for side in (PREFILL, DECODE):
        if (side, state.peers[side]) not in world.books.standings[state.book].holders and not (
            state.stalled and side == PREFILL
        ):
            yield ("join", side), partial(joined, world, state, side)
    leaving = state.draining
    if leaving is None or waits(state, leaving) or world.standings(state, leaving)[0].draining:
        return
    _, waited_for = world.books.do(state.book, ("charged", leaving, state.peers[leaving]))
    if not waited_for:
        yield ("drained", leaving), partial(_drained, world, state, leaving)


def _drained(world: World, state: State, side: int) -> State:
    for rank in range(len(state.ranks(side))):
        state = one_rank(world, state, side, rank, ("drain",))
    return state


def _flying(world: World, state: State, rank: int) -> Steps:
    """What becomes of the writes of one of the sender's ranks."""
    here = world.standing(PREFILL, state.senders[rank])
    for flight in here.flying:
        lives = exposed_by(flight.peer) == state.peers[DECODE]
        if lives:
            yield ("land", rank, flight), partial(_land, world, state, rank, flight)
        there = world.standing(DECODE, state.receivers[rank_of(flight.peer)])
        if flight.peer != there.exposure and (lives or here.at(flight.room) is not None):
            fails = ("ended", flight.number, PutState.FAILED)
            yield ("put fails", rank, flight), partial(one_rank, world, state, PREFILL, rank, fails)


def _records(world: World, state: State) -> Iterator[Possible]:
    """That they land, where none comes late."""
    for rank in range(len(state.senders)):
        for label, make in _flying(world, state, rank):
            if label[0] == "land" and label[2].kind == RECORD:
                yield label, make, True


def _land(world: World, state: State, rank: int, flight: Flight) -> State:
    state = one_rank(world, state, PREFILL, rank, ("ended", flight.number, PutState.DONE))
    return one_rank(world, state, DECODE, rank_of(flight.peer), ("land", flight))


def _patience(world: World, state: State) -> Iterator[Possible]:
    """Nothing moves: whatever deadline runs, it passes."""
    for side in awake(state):
        for rank, standing in enumerate(world.standings(state, side)):
            for room, at in standing.rooms.items():
                if at.phase in LIVE:
                    late = (rank, room)
                    yield ("turn", side, late), partial(turn, world, state, side, late), True
    if not any(turn(world, state, side) != state for side in awake(state)):
        yield from _long_patience(world, state)


def _long_patience(world: World, state: State) -> Iterator[Possible]:
    """Turns change nothing either: what is waited for longest. A sender that lives is not to need it that
    memory is taken back from it."""
    if revokable(world, state):
        yield ("revoke",), partial(revoke, state), state.stalled
    if world.scope.registry:
        yield ("untold",), partial(untold, world, state), True
        if world.books.standings[state.book].overdue:
            yield ("overdue",), partial(abandoned, world, state), True
