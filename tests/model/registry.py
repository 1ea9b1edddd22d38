"""The bootstrap: rooms at their opener, and what the world does with what they request.

The product decides: `OpenedRoom` what a room's end is (`opener.py`), and in scopes with `registry` the tables
who may still have it (`book.py`).
"""

from typing import Any, Final

from baton.handover.opener_messages import (
    ANSWERED,
    Accepted,
    Adopt,
    Break,
    EndChoice,
    Fail,
    FailRest,
    FirstToken,
    Leave,
    MarkAnswered,
    MarkLocal,
    MarkNotAdopted,
    MarkRetired,
    Open,
    OpenerRequest,
    RoomOutcome,
    Stop,
    TokenMessage,
    WorkerMessage,
)
from baton.ids import Incarnation, Opener, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Phase
from baton.rooms.request import FinishReason, Token, TokenBatch
from tests.model.laws import Broken, Law
from tests.model.opener import SIDES, TOKENS
from tests.model.shapes import FIRST_TOKEN, STOP_TOKEN
from tests.model.world import BOOTSTRAP, DEAD, DECODE, GONE, OVER, PREFILL, Entry, Message, State, World

CALLED_OFF: Final = Reason.CANCELLED
"""Why a side is cancelled. Without `ways` what a cancel says makes no difference to what follows, so that
nearly all of them say the same: states that differ in words alone are one."""
SENT: Final = (FirstToken(Token(FIRST_TOKEN), None, 0), RoomOutcome(None))
"""Prefill's messages when its part of a room is complete."""


def cause(world: World, reason: Reason) -> Cause:
    """Return the cause of a room's end for this reason."""
    return Cause(reason if world.scope.ways or reason is Reason.LOCAL else CALLED_OFF, "as the world tells")


# ---- rooms


def issue(world: World, state: State, room: RoomId) -> State:
    """Open a room on the workers that live now, and start its opener."""
    state, issued = _write(world, state, room, "open")
    if issued is None:
        return state  # nobody can take it now
    if issued != room:
        raise Broken(Law.ROOM_UNIQUE, f"room {issued} is issued where room {room} should follow")
    state = state.with_room(room, Entry(world.new_opener, state.peers, state.rooms[room - 1].owner))
    return happens(world, state, room, "start")


def adopt(world: World, state: State, room: RoomId) -> State:
    """Return the state after another bootstrap begins to adopt a room whose bootstrap is dead."""
    entry = state.rooms[room - 1]
    following = Entry(world.new_adopter, entry.peers, Opener(entry.owner + 1))
    return happens(world, state.with_room(room, following), room, "start")


def opener_died(world: World, state: State, room: RoomId) -> State:
    """Return the state after the bootstrap of a room has died, and its streams are about to break.

    An opening under way is lost: had it arrived, it would have arrived before. What is to be adopted may
    still arrive, before the stream breaks.
    """
    entry = state.rooms[room - 1]
    read = world.openers.standings[entry.opener].read
    adopts = {each[0] for each in state.mail if each[1:4] == ("adopt", room, entry.owner)}
    state = state.with_mail(frozenset(each for each in state.mail if each[1:3] != ("open", room)))
    state = state.with_room(room, entry.with_opener(DEAD))
    return state.send(*((side, "orphan", room, entry.owner) for side in read - adopts))


def adopted(world: World, state: State, room: RoomId, side: int, answer: str, owner: Opener) -> State:
    """Return the state after a worker answered a bootstrap that wants to adopt a room. If that bootstrap has
    died, the worker sees its stream break next."""
    entry = state.rooms[room - 1]
    if entry.owner != owner or entry.opener == DEAD:
        return state.send((side, "orphan", room, owner)) if not answer else state
    if answer:
        return happens(world, state, room, "broken", side, Break.REFUSED)
    leader = world.standings(state, side)[0]
    at = leader.at(room)
    state = received(world, state, room, side, Accepted(0 if at is None else at.term))
    if side == DECODE and room in leader.answered:
        return answered(world, state, room, room in leader.local)
    if side == PREFILL and at is not None and at.phase is Phase.SUCCESS:
        return received(world, state, room, side, RoomOutcome(None))
    return state


def happens(world: World, state: State, room: RoomId, deed: str, *about: Any) -> State:
    """Return the state after something happened to a room at its opener, if that lives."""
    opener = state.rooms[room - 1].opener
    if opener < 0:
        return state
    after, requests = world.openers.do(opener, (deed, *about))
    if world.openers.standings[after].settled:
        after = OVER
    if after != opener:
        state = state.with_room(room, state.rooms[room - 1].with_opener(after))
    for request in requests:
        state = _carry_out(world, state, room, request)
    return state


def _carry_out(world: World, state: State, room: RoomId, request: OpenerRequest) -> State:
    match request:
        case Adopt(side, term):
            owner = state.rooms[room - 1].owner
            return state.send((SIDES.index(side), "adopt", room, owner, term or None))
        case MarkNotAdopted():
            return state.with_room(room, state.rooms[room - 1].with_opener(OVER))
        case Open(side):
            to = SIDES.index(side)
            return state.send((to, "open", room, state.peers[1 - to]))
        case Leave(side, why):
            return state.send((SIDES.index(side), "cancel", room, why.reason, *_owner(world, state, room)))
        case EndChoice(choice):
            return state.send((DECODE, "end_choice", room, choice))
        case MarkLocal():
            return _write(world, state, None, "mark_local", room)[0]
        case MarkRetired(side):
            return _write(world, state, None, "retired", room, SIDES.index(side))[0]
        case MarkAnswered():
            return _ended(world, state, room, None)
        case Stop():
            return cancel(world, _ended(world, state, room, None), room, ANSWERED.reason)
        case Fail(why):
            return cancel(world, _ended(world, state, room, why.reason), room, why.reason)
        case FailRest(why):
            return cancel(world, state, room, why.reason)
        case _:
            return state


def received(world: World, state: State, room: RoomId, side: int, *messages: WorkerMessage) -> State:
    """Return the state after the opener got a worker's messages. A worker sends them to the bootstrap that
    owns the room there."""
    at = world.standings(state, side)[0].at(room)
    if at is not None and at.opener != state.rooms[room - 1].owner:
        return state
    return happens(world, state, room, "receive", side, *messages)


def ended_here(world: World, state: State, room: RoomId, side: int, reason: Reason) -> State:
    """Return the state after a worker sent the opener the cause of a room's end."""
    return received(world, state, room, side, RoomOutcome(cause(world, reason)))


def answered(world: World, state: State, room: RoomId, is_local: bool) -> State:
    """Return the state after decode sent the opener all tokens of a room, and its outcome."""
    drawn = tuple(map(Token, [FIRST_TOKEN] * (TOKENS - 1) + [STOP_TOKEN]))
    tokens = [
        TokenMessage(TokenBatch(drawn, FinishReason.STOP, choice), 0, 0, is_local)
        for choice in range(world.scope.choices)
    ]
    return received(world, state, room, DECODE, *tokens, RoomOutcome(None))


def opened(world: World, state: State, room: RoomId, side: int, answer: str) -> State:
    """Return the state after the opener got a worker's answer to a room's opening."""
    if not answer:
        return received(world, state, room, side, Accepted())
    if answer == "RoomExists":
        return state  # it came twice, and its first copy was answered
    how = Break.DRAINING if answer == "Draining" else Break.REFUSED
    return happens(world, state, room, "broken", side, how)


def give_up(world: World, state: State, room: RoomId) -> State:
    """Return the state after a room's client hung up."""
    return happens(world, state, room, "give_up", cause(world, CALLED_OFF))


def fail(world: World, state: State, room: RoomId, reason: Reason) -> State:
    """Return the state after the bootstrap ended a room for a cause of its own, if it had not ended."""
    why, entry = cause(world, reason), state.rooms[room - 1]
    state, is_first = _write(world, state, True, "end", room, why.reason)
    if not is_first:
        return state
    state = cancel(world, state, room, why.reason)
    if entry.opener == GONE:
        return state.with_room(room, entry.with_opener(OVER))
    return happens(world, state, room, "end", why)


def cancel(world: World, state: State, room: RoomId, reason: Reason) -> State:
    """Send the end of a room to each worker that may have it."""
    peers = state.rooms[room - 1].peers
    _, sides = _write(world, state, (PREFILL, DECODE), "sides_to_end", room)
    cancels: set[Message] = {
        (side, "cancel", room, reason, *_owner(world, state, room))
        for side in sides
        if peers[side] == state.peers[side]
    }
    return state.send(*cancels)


def gave_back(world: World, state: State, room: RoomId, side: int) -> State:
    """Return the state after a worker reports a room retired."""
    if not world.scope.registry:
        return state
    return state.send((BOOTSTRAP, "retired", room, side))


def orphaned(world: World, state: State, room: RoomId) -> State:
    """Return the state after the room's opener is gone with its streams, which both sides see break."""
    entry = state.rooms[room - 1]
    state = state.with_room(room, entry.with_opener(GONE))
    return cancel(world, state, room, CALLED_OFF)


def untold(world: World, state: State) -> State:
    """Return the state after the registry ends rooms that were left open without a word."""
    written, rooms = _write(world, state, (), "untold")
    gone = [room for room in rooms if state.rooms[room - 1].opener == GONE]
    for room in gone:
        entry = state.rooms[room - 1].with_opener(OVER)
        written = _ended(world, written, room, Reason.DEADLINE).with_room(room, entry)
        written = cancel(world, written, room, CALLED_OFF)
    return written if gone else state


def abandoned(world: World, state: State) -> State:
    return _write(world, state, RoomId(0), "abandon")[0]


# ---- workers


def lost(world: World, state: State, side: int, incarnation: Incarnation, proof: str | None) -> State:
    """Return the state after the bootstrap lost a worker: the rooms that need it end, and its stream is
    closed."""
    state, rooms = _write(world, state, (), "lose", side, incarnation, proof)
    for room, reason in rooms:
        state = fail(world, state, room, reason)
    for room in read_from(world, state, side, incarnation):
        state = happens(world, state, room, "broken", side, Break.LOST)
    return state


def joined(world: World, state: State, side: int) -> State:
    """Return the state in which the live worker holds a lease, and is told which of its rooms have ended."""
    state, rooms = _write(world, state, (), "join", side, state.peers[side])
    return state.send(*((side, "cancel", room, reason) for room, reason in rooms))


def running(world: World, state: State) -> list[RoomId]:
    """Return the rooms without an outcome whose opener lives."""
    rooms = enumerate(state.rooms)
    return [RoomId(index + 1) for index, entry in rooms if world.is_running(entry)]


def read_from(world: World, state: State, side: int, incarnation: Incarnation) -> list[RoomId]:
    """Return the rooms whose opener reads the stream of this worker."""
    return [
        RoomId(index + 1)
        for index, (opener, peers, _) in enumerate(state.rooms)
        if opener >= 0 and peers[side] == incarnation and side in world.openers.standings[opener].read
    ]


def _owner(world: World, state: State, room: RoomId) -> tuple[Opener, ...]:
    """Return who sends a room's end, in scopes where bootstraps may die."""
    return (state.rooms[room - 1].owner,) if world.scope.adopts else ()


def _ended(world: World, state: State, room: RoomId, reason: Reason | None) -> State:
    state, is_first = _write(world, state, True, "end", room, reason)
    if not is_first:
        raise Broken(Law.FIRST_CAUSE_WINS, f"room {room} runs, and the registry says that it had ended")
    return state


def _write(world: World, state: State, otherwise: Any, deed: str, *about: Any) -> tuple[State, Any]:
    """The registry does something. `otherwise`: what it answers where its tables take no part."""
    if not world.scope.registry:
        return state, otherwise
    book, answer = world.books.do(state.book, (deed, *about))
    return state.with_book(book), answer
