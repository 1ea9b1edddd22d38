"""What the two halves of a session ask of the world: messages under way, commands, answers."""

from collections.abc import Sequence
from typing import Any

from baton.ids import Generation, Incarnation, RoomId
from baton.rooms.errors import Reason
from baton.rooms.phases import Phase
from tests.model.flights import exposure as exposed_by
from tests.model.laws import Broken, Law
from tests.model.pair import DecodeLink, LinkStanding, PrefillStream, StreamStanding
from tests.model.registry import CALLED_OFF
from tests.model.world import DECODE, PREFILL, Message, State, World

Facts = Sequence[tuple[object, ...]]
"""Facts that each rank reports of one effect."""
ON_THE_STREAM = ("connect", "grant", "claim", "close")
"""Messages of decode to prefill. The last word of each says whether it is on the present stream."""


def link_of(world: World, state: State) -> LinkStanding:
    return world.links.standings[state.link]


def stream_of(world: World, state: State) -> StreamStanding:
    return world.streams.standings[state.stream]


def linked(world: World, state: State, *deed: Any) -> State:
    """Return the state after decode's half did something, and what it asks for is on its way."""
    link, asked = world.links.do(state.link, deed)
    state = state.with_link(link)
    prefill, decode = state.peers
    for verb, *about in asked:
        match verb:
            case "connect":
                state = state.send((PREFILL, verb, decode, *about, True))
            case "grant" | "claim" | "close":
                room, *more = about
                state = state.send((PREFILL, verb, room, decode, *more, True))
            case "connected":
                state = state.send((DECODE, verb, prefill))
            case "cancel":
                state = cancel_here(world, state, *about)
            case _:
                state = state.send((DECODE, verb, *about))
    return state


def streamed(world: World, state: State, *deed: Any) -> State:
    """Return the state after prefill's half did something, and what it asks for is done."""
    stream, asked = world.streams.do(state.stream, deed)
    state = state.with_stream(stream)
    for verb, room, *about in asked:
        if verb == "apply grant":
            (grant,) = about
            answer, state = command(world, state, PREFILL, *grant)
            _check_claim(grant[0], room, answer)
            leader = world.standings(state, PREFILL)[0]
            is_open, is_retired = leader.at(room) is not None, room in leader.past
            state = streamed(world, state, "grant_applied", room, grant, answer, is_open, is_retired)
        elif verb == "apply close":
            answer, state = command(world, state, PREFILL, "close", room, state.peers[DECODE], *about)
            state = streamed(world, state, "close_applied", room, *about, answer)
        else:
            state = linked(world, state, verb, room, *about)
    return state


def arrives(world: World, state: State, message: Message, *, repeat: bool) -> State:
    """Return the state after a grant, a claim or a close has come to prefill. `repeat`: no half notices."""
    _, deed, room, receiver, *about, is_present = message
    if is_present and receiver == state.peers[DECODE] and not repeat:
        if deed == "close":
            return streamed(world, state, deed, room, *about)
        return streamed(world, state, "grant", room, (deed, room, receiver, *about))
    answer, state = command(world, state, PREFILL, deed, room, receiver, *about)
    _check_claim(deed, room, answer)
    return state


def _check_claim(deed: str, room: RoomId, answer: str) -> None:
    if deed == "claim" and answer == "PeerFault":
        raise Broken(Law.MINE_OR_GRANTED, f"room {room} is claimed, and was granted")


def command(world: World, state: State, side: int, deed: str, *about: Any) -> tuple[str, State]:
    """Let all ranks obey a command, and return the leader's answer with the next state."""
    ways = world.scope.ways
    told: tuple[Any, ...] = (deed, *about)
    if deed == "open" and side == DECODE and ways:
        told = (*told, link_of(world, state).is_connected and about[1] == state.peers[PREFILL])
    elif deed == "grant":
        told = (*told, world.reached(state))
    do = world.casts[side].do
    after = [do(rank, told) for rank in state.ranks(side)]
    answers = [answer for _, answer in after]
    if len(set(answers)) > 1 and not (ways and set(answers) == {"", "NotConnected"}):
        raise Broken(Law.COMMANDS_ORDERED, f"ranks answer a {deed} with {sorted(set(answers))}")
    return answers[0], state.with_ranks(side, [rank for rank, _ in after])


def cancel_here(world: World, state: State, room: RoomId, reason: Reason) -> State:
    """Return the state after decode's own leader ends a room that its sender did not take."""
    return state.send((DECODE, "cancel", room, reason if world.scope.ways else CALLED_OFF))


# ---- what decode's ranks ask for


def opened(world: World, state: State, room: RoomId, peer: Incarnation) -> State:
    """A room has come to decode, and waits for it that its sender knows our memory."""
    at = world.standings(state, DECODE)[0].at(room)
    waits = at is not None and at.phase is Phase.BOOTSTRAPPING and at.cause is None
    if not waits or peer != state.peers[PREFILL] or not world.scope.ways:
        return state  # its sender may be gone, which will be told
    return linked(world, state, "connect", room)


def grant(world: World, state: State, room: RoomId, told: Facts) -> State:
    if len(set(told)) > 1:
        raise Broken(Law.ADMISSION_AGREED, f"ranks reserve room {room} differently: {told}")
    sender = state.rooms[room - 1].peers[PREFILL]
    if sender == state.peers[PREFILL]:
        return linked(world, state, "grant", room, sender, *told[0][1:])
    # The grant goes where nobody is.
    link, _ = world.links.do(_new_link(world, state), ("grant", room, sender, *told[0][1:]))
    for verb, *about in world.links.do(link, ("broke",))[1]:
        if verb == "cancel":
            state = cancel_here(world, state, *about)
    return state


def claim(world: World, state: State, room: RoomId) -> State:
    """Decode computes the room itself, and its sender is told."""
    sender = state.rooms[room - 1].peers[PREFILL]
    return linked(world, state, "claim", room, sender) if sender == state.peers[PREFILL] else state


def close(world: World, state: State, room: RoomId, told: Facts) -> State:
    """A failed room's sender is asked to be quiet, if the leader's hand-over says so."""
    if not told[0] or state.rooms[room - 1].peers[PREFILL] != state.peers[PREFILL]:
        return state  # the end of its process is the proof
    return linked(world, state, "close", room, *told[0][1:])


def exposed_anew(world: World, state: State) -> State:
    if not world.scope.ways:
        return state
    return linked(world, state, "exposed_anew", world.standings(state, DECODE)[0].exposure)


# ---- prefill's proof


def can_acknowledge(world: World, state: State, room: RoomId) -> bool:
    """The sender's leader holds the room no more."""
    return world.standings(state, PREFILL)[0].at(room) is None


def acknowledge(world: World, state: State, room: RoomId, generation: Generation) -> State:
    for standing in world.standings(state, PREFILL):
        for flight in standing.flying:
            if flight.room == room:
                raise Broken(
                    Law.ACK_IS_PROOF,
                    f"the close of room {room} is acknowledged while a {flight.kind} can still land",
                )
    return streamed(world, state, "quiet", room, generation)


# ---- ends of the stream


def broke(world: World, state: State) -> State:
    """Return the state after the stream broke. A grant that is under way may come all the same."""
    state = _end_stream(world, state, state.peers[DECODE])
    return linked(world, state, "broke")


def _end_stream(world: World, state: State, receiver: Incarnation) -> State:
    stream, early = world.streams.do(state.stream, ("ended", receiver))
    under_way = [each for each in state.mail if each[0] == PREFILL and each[1] in ON_THE_STREAM]
    late = {(*each[:-1], False) for each in under_way if each[1] == "grant"}
    late |= {(PREFILL, *each, False) for each in early if each[0] == "grant"}
    return state.with_stream(stream).with_mail(state.mail.difference(under_way) | late)


def parted(world: World, state: State, side: int) -> State:
    """Return the state after the process of one side has ended, before another has its place."""
    if side == DECODE:
        return _end_stream(world, state, state.peers[DECODE])
    return linked(world, state, "broke")


def met(world: World, state: State, side: int) -> State:
    """Return the state after another process has the place of one that has ended."""
    exposure = exposed_by(state.peers[DECODE], 1, 0) if side == DECODE else link_of(world, state).exposure
    link = world.links.enter(DecodeLink(exposure, ways=world.scope.ways))
    return state.with_link(link).with_stream(world.streams.enter(PrefillStream(state.peers[DECODE])))


def _new_link(world: World, state: State) -> int:
    exposure = link_of(world, state).exposure
    return world.links.enter(DecodeLink(exposure, ways=world.scope.ways))
