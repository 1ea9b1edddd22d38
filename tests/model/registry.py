"""Reactions of the bootstrap to events of a room.

As `baton.bootstrap.room_stream` and `rooms`: it calls both workers at once; the first cause ends the room,
and the other side is told. The registry itself: `book.py`.
"""

from typing import Any, Final

from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Reason
from tests.model.laws import Broken, Law
from tests.model.world import BOOTSTRAP, DECODE, PREFILL, Entry, Known, Message, State, World

CALLED_OFF: Final = Reason.CANCELLED
"""Why a side is cancelled. Without `ways` what a cancel says makes no difference to what follows, so that
nearly all of them say the same: states that differ in words alone are one."""

RUNNING: Final = (Known.CALLED, Known.LOCAL)


def issue(world: World, state: State, room: RoomId) -> State:
    """Open a room on the workers that live now, and call both."""
    state, issued = _write(world, state, room, "open")
    if issued is None:
        return state  # nobody can take it now
    if issued != room:
        raise Broken(Law.ROOM_UNIQUE, f"room {issued} is issued where room {room} should follow")
    entry = Entry(Known.CALLED, state.peers)
    calls = {(side, "open", room, state.peers[1 - side]) for side in (PREFILL, DECODE)}
    return state.with_room(room, entry).send(*calls)


def over(world: World, state: State, room: RoomId, reason: Reason, *told: int) -> State:
    """Return the state after the room's first cause is known. Each live side that is not in `told` is
    cancelled."""
    if state.rooms[room - 1].known not in RUNNING:
        return _heard(world, state, room, reason)
    state = _ended(world, state, room, reason)
    return cancel(state, room, reason, *told)


def cancel(state: State, room: RoomId, reason: Reason, *told: int) -> State:
    entry = state.rooms[room - 1]
    cancels: set[Message] = {
        (side, "cancel", room, reason)
        for side in (PREFILL, DECODE)
        if side not in told and entry.peers[side] == state.peers[side]
    }
    return state.send(*cancels)


def answered(world: World, state: State, room: RoomId) -> State:
    """Return the state after the client got all that it asked for."""
    if state.rooms[room - 1].known not in RUNNING:
        return _heard(world, state, room, None)
    return _ended(world, state, room, None)


def gave_back(world: World, state: State, room: RoomId, side: int) -> State:
    """Return the state after a worker reports a room retired."""
    if not world.scope.registry:
        return state
    return state.send((BOOTSTRAP, "retired", room, side))


def lost(world: World, state: State, side: int, incarnation: Incarnation, proof: str | None) -> list[RoomId]:
    """Rooms without an outcome that end with a worker, and what the registry is without it."""
    running = running_on(state, side, incarnation)
    if not world.scope.registry:
        return running
    had = world.books.do(state.book, ("lose", side, incarnation, proof))[1]
    return [room for room in running if room in had]


def without(world: World, state: State, side: int, incarnation: Incarnation, proof: str | None) -> State:
    """Return the state in which the worker has left the registry."""
    return _write(world, state, RoomId(0), "lose", side, incarnation, proof)[0]


def joined(world: World, state: State, side: int) -> State:
    """Return the state in which the live worker holds a lease."""
    return _write(world, state, RoomId(0), "join", side, state.peers[side])[0]


def claimed(state: State, room: RoomId) -> State:
    """Return the state in which prefill's part has ended and decode goes on by itself."""
    entry = state.rooms[room - 1]
    if entry.known is not Known.CALLED:
        return state
    return state.with_room(room, Entry(Known.LOCAL, entry.peers))


def orphaned(state: State, room: RoomId) -> State:
    """Return the state after the room's opener is gone with its streams, which both sides see break."""
    entry = state.rooms[room - 1]
    return cancel(state.with_room(room, Entry(Known.ORPHANED, entry.peers)), room, CALLED_OFF)


def untold(world: World, state: State) -> State:
    """Return the state after the registry ends rooms that were left open without a word."""
    written, rooms = _write(world, state, (), "untold")
    gone = [room for room in rooms if state.rooms[room - 1].known is Known.ORPHANED]
    for room in gone:
        written = cancel(_ended(world, written, room, Reason.DEADLINE), room, CALLED_OFF)
    return written if gone else state


def abandoned(world: World, state: State) -> State:
    return _write(world, state, RoomId(0), "abandon")[0]


def running(state: State) -> list[RoomId]:
    """Return the rooms without an outcome."""
    return [RoomId(index + 1) for index, entry in enumerate(state.rooms) if entry.known in RUNNING]


def running_on(state: State, side: int, incarnation: Incarnation) -> list[RoomId]:
    """Return the running rooms that the registry placed on a worker and that need it."""
    rooms = [(room, state.rooms[room - 1]) for room in running(state)]
    needed = [each for each in rooms if side == DECODE or each[1].known is not Known.LOCAL]
    return [room for room, entry in needed if entry.peers[side] == incarnation]


def _ended(world: World, state: State, room: RoomId, reason: Reason | None) -> State:
    state, told = _write(world, state, room, "end", room, reason)
    if told is None:
        raise Broken(Law.FIRST_CAUSE_WINS, f"room {room} runs, and the registry says that it had ended")
    return state.with_room(room, Entry(Known.OVER, state.rooms[room - 1].peers))


def _heard(world: World, state: State, room: RoomId, reason: Reason | None) -> State:
    """Check that the registry refuses another outcome of a room that is over."""
    if state.rooms[room - 1].known is not Known.OVER:
        return state
    state, told = _write(world, state, None, "end", room, reason)
    if told is not None:
        raise Broken(Law.FIRST_CAUSE_WINS, f"room {room} has ended, and the registry takes another outcome")
    return state


def _write(world: World, state: State, otherwise: Any, deed: str, *about: Any) -> tuple[State, Any]:
    """The registry does something. `otherwise`: what it answers where its tables take no part."""
    if not world.scope.registry:
        return state, otherwise
    book, answer = world.books.do(state.book, (deed, *about))
    return state.with_book(book), answer
