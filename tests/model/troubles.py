"""What can go wrong next, as far as the budget reaches?"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from services.rooms.errors import Reason
from services.rooms.ids import Incarnation, RoomId
from tests.model.registry import CALLED_OFF, over, running_on
from tests.model.turns import deliver, turn
from tests.model.world import DECODE, PREFILL, TROUBLES, WANTED, Known, Message, State, World, one_rank

Label = tuple[Any, ...]
Possible = tuple[Label, Callable[[], State], bool]
"""A verb and what it is about, how to get the next state, and whether it is no trouble."""
Steps = Iterator[tuple[Label, Callable[[], State]]]


def troubles(world: World, state: State) -> Iterator[Possible]:
    if not any(state.left):
        return
    for index, trouble in enumerate(TROUBLES):
        if state.left[index]:
            left = (*state.left[:index], state.left[index] - 1, *state.left[index + 1 :])
            spent = state._replace(left=left)
            for label, make in _OF[trouble](world, spent):
                yield label, make, False


def _aborts(world: World, state: State) -> Steps:
    for index, entry in enumerate(state.rooms):
        if entry.known in (Known.CALLED, Known.ACCEPTED):
            room = RoomId(index + 1)
            yield ("abort", room), partial(over, state, room, CALLED_OFF)


def _silences(world: World, state: State) -> Steps:
    if running_on(state, PREFILL, state.peers[PREFILL]):
        yield ("silence",), partial(_silence, state)


def _silence(state: State) -> State:
    for room in running_on(state, PREFILL, state.peers[PREFILL]):
        state = over(state, room, Reason.PREFILL_LOST, PREFILL)
    return state


def _losses(world: World, state: State) -> Steps:
    for message in state.mail:
        if message[1] != "depart":  # told again with every lease renewal
            yield ("lose", message), partial(_lose, state, message)


def _lose(state: State, message: Message) -> State:
    _, deed, room, *_ = message
    state = state._replace(mail=state.mail - {message})
    match deed:
        case "open":
            return over(state, room, CALLED_OFF)
        case "grant":
            return state._replace(mail=state.mail | {(DECODE, "cancel", room, CALLED_OFF)})
        case "quiet":
            asked = frozenset(
                each._replace(asked=WANTED) if each.room == room else each for each in state.closes
            )
            return state._replace(closes=asked)
        case _:
            return state


def _repeats(world: World, state: State) -> Steps:
    for message in state.mail:
        yield ("repeat", message), partial(deliver, world, state, message, repeat=True)


def _failures(world: World, state: State) -> Steps:
    for side in (PREFILL, DECODE):
        for rank, standing in enumerate(world.standings(state, side)):
            for room in (*standing.rooms, *sorted(standing.past)):
                yield ("fail", side, rank, room), partial(one_rank, world, state, side, rank, ("fail", room))
    for rank, standing in enumerate(world.standings(state, PREFILL)):
        for flight in standing.flying:
            deed = ("put_failed", flight.number)
            yield ("put fails", rank, flight), partial(one_rank, world, state, PREFILL, rank, deed)


def _rumours(world: World, state: State) -> Steps:
    for index, entry in enumerate(state.rooms):
        room = RoomId(index + 1)
        for side in (PREFILL, DECODE) if entry.known is not Known.UNISSUED else ():
            for rank, standing in enumerate(world.standings(state, side)):
                if room not in standing.rooms and room not in standing.past:
                    deed = ("fail", room)
                    yield ("fail", side, rank, room), partial(one_rank, world, state, side, rank, deed)


def _expiries(world: World, state: State) -> Steps:
    for side in (PREFILL, DECODE):
        for rank, standing in enumerate(world.standings(state, side)):
            for room in standing.rooms:
                yield ("turn", side, (rank, room)), partial(turn, world, state, side, (rank, room))


def _sender_deaths(world: World, state: State) -> Steps:
    yield ("die", PREFILL), partial(_die, world, state, PREFILL)


def _receiver_deaths(world: World, state: State) -> Steps:
    yield ("die", DECODE), partial(_die, world, state, DECODE)


def _die(world: World, state: State, side: int) -> State:
    """A worker's process ends, and with it its writes and its memory; another takes its place. That it is
    gone becomes known to the other side."""
    gone = state.peers[side]
    blank = world.blank[side]
    peers = (
        (Incarnation(gone + 1), state.peers[DECODE])
        if side == PREFILL
        else (state.peers[PREFILL], Incarnation(gone + 1))
    )
    pairs = tuple(
        (blank, pair[DECODE]) if side == PREFILL else (pair[PREFILL], blank) for pair in state.pairs
    )
    mail = frozenset(message for message in state.mail if message[0] != side) | {(1 - side, "depart", gone)}
    closes = frozenset(each._replace(asked=min(each.asked, WANTED)) for each in state.closes)
    if side == DECODE:
        closes = frozenset()
    following = state._replace(pairs=pairs, mail=mail, peers=peers, closes=closes)
    for room in running_on(state, side, gone):
        following = over(following, room, CALLED_OFF)
    return following


_OF: dict[str, Callable[[World, State], Steps]] = {
    "aborts": _aborts,
    "silences": _silences,
    "losses": _losses,
    "repeats": _repeats,
    "failures": _failures,
    "rumours": _rumours,
    "expiries": _expiries,
    "sender_deaths": _sender_deaths,
    "receiver_deaths": _receiver_deaths,
}
