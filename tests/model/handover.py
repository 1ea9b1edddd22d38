"""Conversation of the two workers about a room.

As `baton.decode.prefill_peers` and `baton.prefill.handover_stream` do: connect, grant, close.
The receiver's leader calls, and the sender's leader answers. A call that is not answered has been lost, or
the sender stands still; either way what the receiver makes of it is here.
"""

from collections.abc import Sequence

from baton.ids import Generation, Incarnation, RoomId
from baton.rooms.errors import Reason
from baton.rooms.phases import Phase
from tests.model.laws import Broken, Law
from tests.model.registry import CALLED_OFF
from tests.model.world import (
    ACKNOWLEDGED,
    ASKED,
    DECODE,
    PREFILL,
    WANTED,
    Close,
    Message,
    State,
    Way,
    World,
)

Facts = Sequence[tuple[object, ...]]
"""Facts that each rank reports of one effect."""

# ---- connect


def opened(world: World, state: State, peer: Incarnation) -> State:
    """A room has come to decode, and waits for it that its sender knows our memory."""
    if peer != state.peers[PREFILL] or state.way is not Way.UNKNOWN:
        return state  # known, being made known, or gone, which will be told
    return ask_to_connect(world, state.with_way(Way.CONNECTING), None)


def ask_to_connect(world: World, state: State, then: Message | None) -> State:
    """`then`: the grant that is sent once more afterwards."""
    exposure = world.standings(state, DECODE)[0].exposure
    return state.send((PREFILL, "connect", state.peers[DECODE], exposure, then))


def connected(world: World, state: State, message: Message, answer: str) -> State:
    _, _, receiver, exposure, then = message
    if receiver != state.peers[DECODE]:
        return state
    if answer or exposure != world.standings(state, DECODE)[0].exposure:
        # A way that broke is made anew once nothing is under way on it, and always where our memory is.
        return ask_to_connect(world, state, then)
    if then is not None:
        return state.send(then)
    return state.with_way(Way.CONNECTED).send((DECODE, "connected", state.peers[PREFILL]))


def doubted(world: World, state: State) -> State:
    """Return the state in which the next room connects anew, since the connection is doubted."""
    if world.scope.ways and state.way is Way.CONNECTED:
        return state.with_way(Way.UNKNOWN)
    return state


def exposed_anew(world: World, state: State) -> State:
    """Tell every sender that knew the memory's place the new one, whether or not a room waits for it."""
    if not world.scope.ways or state.way is Way.CONNECTING:
        return state  # it is asked on, where our memory is by then
    return ask_to_connect(world, state.with_way(Way.CONNECTING), None)


def not_connected(world: World, state: State, message: Message) -> State:
    """Return the state after a connect request that nothing answered."""
    _, _, receiver, _, then = message
    if receiver != state.peers[DECODE]:
        return state
    state = state.with_way(Way.UNKNOWN)
    if then is not None:
        return cancel_here(world, state, then[2], Reason.PREFILL_LOST)
    for room, at in world.standings(state, DECODE)[0].rooms.items():
        if at.phase is Phase.BOOTSTRAPPING:
            state = cancel_here(world, state, room, Reason.CONNECT_FAILED)
    return state


# ---- grant


def grant(world: World, state: State, room: RoomId, told: Facts) -> State:
    if len(set(told)) > 1:
        raise Broken(Law.ADMISSION_AGREED, f"ranks reserve room {room} differently: {told}")
    peers = state.rooms[room - 1].peers
    if peers[PREFILL] != state.peers[PREFILL]:
        return cancel_here(world, state, room, Reason.PREFILL_LOST)
    _, exposure, generation, pages, slot = told[0]
    message = (PREFILL, "grant", room, peers[DECODE], exposure, generation, pages, slot, False)
    return state.send(message)


def refused(world: World, state: State, message: Message, answer: str) -> State:
    """Connect anew, once, if the connection is unknown or leads to the memory's old place."""
    room, receiver, again = message[2], message[3], message[-1]
    if answer == "UnknownRoom" and any(each[:3] == (PREFILL, "open", room) for each in state.mail):
        return _again(world, state, message)
    if answer == "NotConnected" and world.scope.ways and not again and receiver == state.peers[DECODE]:
        return ask_to_connect(world, state, (*message[:-1], True))
    return cancel_here(world, state, room, Reason.CONNECT_FAILED)


def _again(world: World, state: State, message: Message) -> State:
    """The room is on its way to the sender: for as long as it waits for it here, the grant is made again."""
    room, receiver = message[2], message[3]
    at = world.standings(state, DECODE)[0].at(room)
    wanted = receiver == state.peers[DECODE] and at is not None and at.phase is Phase.TRANSFERRING
    return state.send(message) if wanted else state


def cancel_here(world: World, state: State, room: RoomId, reason: Reason) -> State:
    """Return the state after decode's own leader ends a room that its sender did not take."""
    if state.rooms[room - 1].peers[DECODE] != state.peers[DECODE]:
        return state
    cancel = (DECODE, "cancel", room, reason if world.scope.ways else CALLED_OFF)
    return state.send(cancel)


# ---- mine


def claim(state: State, room: RoomId) -> State:
    """Decode computes the room itself: its sender is told, in the place of a grant."""
    peers = state.rooms[room - 1].peers
    if peers[PREFILL] != state.peers[PREFILL]:
        return state
    return state.send((PREFILL, "claim", room, peers[DECODE]))


def claim_refused(state: State, message: Message, answer: str) -> State:
    """Return the state after a refused claim. A claim that comes before its room is kept for it, as a grant
    is."""
    room = message[2]
    if answer == "PeerFault":
        raise Broken(Law.MINE_OR_GRANTED, f"room {room} is claimed, and was granted")
    coming = any(each[:3] == (PREFILL, "open", room) for each in state.mail)
    return state.send(message) if coming else state


# ---- close


def wants_close(world: World, state: State, room: RoomId, told: Facts) -> State:
    """A failed room's sender is asked to be quiet, if the leader's hand-over says so."""
    if not told[0]:
        return state
    _, generation, doubtful = told[0]
    close = Close(room, Generation(int(str(generation))), WANTED)
    if doubtful and state.rooms[room - 1].peers[PREFILL] == state.peers[PREFILL]:
        state = doubted(world, state)
    return state.with_closes(state.closes | {close})


def asked(state: State, close: Close) -> State:
    """The close has reached the sender."""
    return _closes(state, close, close.with_asked(ASKED))


def can_acknowledge(world: World, state: State, close: Close) -> bool:
    """The sender's leader holds the room no more."""
    return close.asked == ASKED and world.standings(state, PREFILL)[0].at(close.room) is None


def acknowledge(world: World, state: State, close: Close) -> State:
    for standing in world.standings(state, PREFILL):
        for flight in standing.flying:
            if flight.room == close.room:
                raise Broken(
                    Law.ACK_IS_PROOF,
                    f"the close of room {close.room} is acknowledged while a {flight.kind} can still land",
                )
    quiet = (DECODE, "quiet", close.room, close.generation)
    return _closes(state, close, close.with_asked(ACKNOWLEDGED)).send(quiet)


def _closes(state: State, close: Close, now: Close) -> State:
    return state.with_closes(state.closes - {close} | {now})
