"""What does the bootstrap do about a room? As `services.bootstrap.follower` and `rooms`, in the little that
matters here: it calls prefill, then decode; the first cause ends the room, and the other side is told."""

from typing import Final

from services.rooms.errors import Reason
from services.rooms.ids import Incarnation, RoomId
from tests.model.world import DECODE, PREFILL, Entry, Known, Message, State

CALLED_OFF: Final = Reason.CANCELLED
"""Why a side is cancelled. What a cancel says makes no difference to what follows, so that nearly all of them
say the same: states that differ in words alone are one. (A lease that ran out has its own word: `slips`.)"""


def issue(state: State, room: RoomId) -> State:
    """Open a room on the workers that live now, and call prefill."""
    entry = Entry(Known.CALLED, state.peers)
    call = (PREFILL, "open", room, state.peers[DECODE])
    return _known(state, room, entry)._replace(mail=state.mail | {call})


def accepted(state: State, room: RoomId) -> State:
    """The prefill worker holds the room: call decode, if the room still runs."""
    entry = state.rooms[room - 1]
    if entry.known is not Known.CALLED:
        return state
    if entry.peers[DECODE] != state.peers[DECODE]:
        return over(state, room, CALLED_OFF)
    call = (DECODE, "open", room, entry.peers[PREFILL])
    following = _known(state, room, entry._replace(known=Known.ACCEPTED))
    return following._replace(mail=following.mail | {call})


def over(state: State, room: RoomId, reason: Reason, *told: int) -> State:
    """The room's first cause is known: every side that lives, and is not `told` already, is cancelled."""
    entry = state.rooms[room - 1]
    if entry.known not in (Known.CALLED, Known.ACCEPTED):
        return state
    cancels: set[Message] = {
        (side, "cancel", room, reason)
        for side in (PREFILL, DECODE)
        if side not in told and entry.peers[side] == state.peers[side]
    }
    return _known(state, room, entry._replace(known=Known.OVER))._replace(mail=state.mail | cancels)


def answered(state: State, room: RoomId) -> State:
    """The client has all that it asked for."""
    return _known(state, room, state.rooms[room - 1]._replace(known=Known.OVER))


def running_on(state: State, side: int, incarnation: Incarnation) -> list[RoomId]:
    """Rooms without an outcome that the registry placed on a worker."""
    return [
        RoomId(index + 1)
        for index, entry in enumerate(state.rooms)
        if entry.known in (Known.CALLED, Known.ACCEPTED) and entry.peers[side] == incarnation
    ]


def _known(state: State, room: RoomId, entry: Entry) -> State:
    rooms = list(state.rooms)
    rooms[room - 1] = entry
    return state._replace(rooms=tuple(rooms))
