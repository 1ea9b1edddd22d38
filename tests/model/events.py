"""Events that can happen next in a state.

Each event is one atomic deed: one turn of a worker, one message that arrives, one write that lands, one
trouble. It is told of the side that it happens on, from what stands there and from what both sides share
(mail, rooms, closes, …); one that happens on neither with decode's.
"""

from collections.abc import Iterator
from functools import partial

from baton.ids import RoomId
from baton.rooms.phases import Phase
from baton.transfer.transfer_protocol import PutState
from tests.model.cast import Deed
from tests.model.flights import RECORD, Flight, exposed_by, rank_of
from tests.model.laws import Broken
from tests.model.packing import tidy
from tests.model.registry import abandoned, issue, joined, untold
from tests.model.stream import acknowledge, broke, can_acknowledge, stream_of, streamed
from tests.model.troubles import (
    Label,
    Make,
    Possible,
    Steps,
    alive,
    awake,
    bound_for,
    is_missed,
    lease_ends,
    misses,
    revokable,
    revoke,
    silence,
    troubles,
    waits,
)
from tests.model.turns import catch_up, deliver, turn
from tests.model.world import DECODE, PREFILL, UNISSUED, State, World, one_rank
from tests.rooms.group import LIVE

BOTH = (PREFILL, DECODE)


def after(world: World, state: State) -> Iterator[tuple[Label, State | Broken]]:
    """(label, next state) of every event, of those first that nothing else must come before; where a law
    breaks, Broken stands in place of the next state. (Which of them the search takes, and when, is
    `tests.model.following`'s.)"""
    steps = list(flying(world, state))
    for find in (moving, turning, troubles, patient):
        steps += [step for side in BOTH for step in find(world, state, side)]
    for label, make in [*steps, *((label, make) for label, make, _ in long_patient(world, state))]:
        try:
            following = make(state)
            world.check(following)
            tidy(world, following)  # which tries what is left out
        except Broken as broken:
            yield label, broken
        else:
            yield label, following


def begin(world: World) -> State:
    """Return the first state: the first rooms of the scope run, and nothing else has happened."""
    state, begun = world.start(), world.scope.begun
    later = [("issue", RoomId(room + 1)) for room in range(begun, world.scope.rooms)]
    while any(
        (at := standing.at(RoomId(room + 1))) is None or at.phase is not Phase.SUCCESS
        for standing in world.standings(state, DECODE)
        for room in range(begun)
    ):
        steps = list(flying(world, state))
        steps += [step for find in (moving, turning) for side in BOTH for step in find(world, state, side)]
        steps.sort(key=lambda step: repr(step[0]))  # mail has no order of its own
        calm = (make(state) for label, make in steps if label not in later and label[0] != "step ends")
        state = next(following for following in calm if following != state)
    return state


def is_motion(label: Label) -> bool:
    """Return whether the event is a motion. While motions are to come, a deadline passes only as a
    trouble."""
    return bool(label[0] != "issue")


def turning(world: World, state: State, side: int) -> Steps:
    if side in awake(state):
        yield ("turn", side, None), partial(turn, world, side=side)


def moving(world: World, state: State, side: int) -> Steps:
    """Yield events outside of turns."""
    if side == DECODE:
        yield from _issuing(world, state)
        yield from _missing(world, state)
        yield from _registering(world, state)
    if state.lag is not None and waits(state, side):
        yield ("catch up", *state.lag[:2]), partial(catch_up, world)
    yield from _arriving(world, state, side)
    if side == PREFILL and not state.stalled:
        yield from _waiting(world, state)
    yield from _leaving(world, state, side)
    for rank, standing in enumerate(world.standings(state, side) if side in alive(state) else ()):
        if standing.stepping:
            ends: Deed = ("step_ends",)
            yield ("step ends", side, rank), partial(one_rank, world, side=side, rank=rank, deed=ends)


def _arriving(world: World, state: State, side: int) -> Steps:
    for message in bound_for(state, side):
        if not waits(state, message[0]) and not (side == PREFILL and state.stalled):
            yield ("deliver", message), partial(deliver, world, message=message)


def _missing(world: World, state: State) -> Steps:
    """Yield effects of prefill's standstill: missed calls, and the lease's end."""
    if not state.stalled:
        return
    for message in bound_for(state, PREFILL):
        if not waits(state, PREFILL) and is_missed(message):
            yield ("miss", message), partial(misses, world, message=message)
    if broke(world, state) != state:
        yield ("break",), partial(broke, world)
    if lease_ends(world, state):
        yield ("silence",), partial(silence, world)


def _issuing(world: World, state: State) -> Steps:
    if state.stalled or state.draining is not None:
        return
    for index, entry in enumerate(state.rooms):
        if entry.opener == UNISSUED:
            yield ("issue", RoomId(index + 1)), partial(issue, world, room=RoomId(index + 1))
            break
        if not world.is_over(entry) and not world.scope.overlap:
            break


def _waiting(world: World, state: State) -> Steps:
    """Yield ends of what waits at prefill: closes of rooms that are quiet, and grants whose rooms do not
    come."""
    stream = stream_of(world, state)
    for room, generation in stream.awaited:
        if can_acknowledge(world, state, room):
            label = ("acknowledge", room)
            yield label, partial(acknowledge, world, room=room, generation=generation)
    for room in stream.early if not waits(state, PREFILL) else ():
        if not any(each[:3] == (PREFILL, "open", room) for each in state.mail):
            yield ("expire", room), partial(_expire, world, room=room)


def _expire(world: World, state: State, room: RoomId) -> State:
    return streamed(world, state, "expired", room)


def _registering(world: World, state: State) -> Steps:
    """Yield registrations of workers that lost their lease."""
    for side in BOTH if world.scope.registry else ():
        if (side, state.peers[side]) not in world.books.standings[state.book].holders and not (
            state.stalled and side == PREFILL
        ):
            yield ("join", side), partial(joined, world, side=side)


def _leaving(world: World, state: State, side: int) -> Steps:
    """Yield leave orders to workers that have to leave and that nothing waits for."""
    if state.draining != side or not world.scope.registry or waits(state, side):
        return
    if world.standings(state, side)[0].draining:
        return
    _, waited_for = world.books.do(state.book, ("charged", side, state.peers[side]))
    if not waited_for:
        yield ("drained", side), partial(_drained, world, side=side)


def _drained(world: World, state: State, side: int) -> State:
    for rank in range(len(state.ranks(side))):
        state = one_rank(world, state, side, rank, ("drain",))
    return state


def flying(world: World, state: State) -> Steps:
    """Yield ends of writes under way, from the ranks of both sides and the live processes."""
    for rank, here in enumerate(world.standings(state, PREFILL)):
        for flight in here.flying:
            lives = exposed_by(flight.peer) == state.peers[DECODE]
            if lives:
                yield ("land", rank, flight), partial(_land, world, rank=rank, flight=flight)
            there = world.standing(DECODE, state.receivers[rank_of(flight.peer)])
            if flight.peer != there.exposure and (lives or here.at(flight.room) is not None):
                fails: Deed = ("ended", flight.number, PutState.FAILED)
                label = ("put fails", rank, flight)
                yield label, partial(one_rank, world, side=PREFILL, rank=rank, deed=fails)


def landing(world: World, lands: list[tuple[Label, Make]]) -> list[tuple[Label, Make]]:
    """Yield the ends that come before anything else: landing records, in scopes without late ones."""
    if not world.scope.early_records:
        return []
    return [each for each in lands if each[0][0] == "land" and each[0][2].kind == RECORD]


def _land(world: World, state: State, rank: int, flight: Flight) -> State:
    state = one_rank(world, state, PREFILL, rank, ("ended", flight.number, PutState.DONE))
    return one_rank(world, state, DECODE, rank_of(flight.peer), ("land", flight))


def patient(world: World, state: State, side: int) -> Steps:
    """Yield the events in which a deadline passes although nothing moves."""
    for rank, standing in enumerate(world.standings(state, side) if side in awake(state) else ()):
        for room, at in standing.rooms.items():
            if at.phase in LIVE:
                late = (rank, room)
                yield ("turn", side, late), partial(turn, world, side=side, late=late)


def long_patient(world: World, state: State) -> Iterator[Possible]:
    """Turns change nothing either: what is waited for longest. A sender that lives is not to need it that
    memory is taken back from it."""
    if revokable(world, state):
        yield ("revoke",), revoke, state.stalled
    if world.scope.registry:
        yield ("untold",), partial(untold, world), True
        if world.books.standings[state.book].overdue:
            yield ("overdue",), partial(abandoned, world), True
