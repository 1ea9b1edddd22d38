"""What does a worker do, all its ranks together: take a turn, obey a command, answer a close?

The laws that a single rank cannot see are checked here: all ranks do the same, and none admits a room that
is not there on every rank.
"""

from collections.abc import Sequence

from services.rooms.ids import RoomId
from services.rooms.phases import Effect
from tests.model.decode_rank import Done
from tests.model.laws import Broken, Law
from tests.model.registry import CALLED_OFF, accepted, answered, over
from tests.model.world import (
    ACKNOWLEDGED,
    ASKED,
    DECODE,
    PREFILL,
    SIDES,
    WANTED,
    Close,
    Message,
    State,
    World,
    replaced,
)


def turn(world: World, state: State, side: int, late: tuple[int, RoomId] | None = None) -> State:
    """See, vote, agree, act, compute, on every rank. `late`: (rank, room) whose deadline has passed there.

    A turn that did no more than queue rooms is taken together with the next."""
    ranks, done = agree(world, side, tuple(pair[side] for pair in state.pairs), late)
    following = state._replace(pairs=replaced(state.pairs, side, ranks))
    if done[0] and all(effect is Effect.QUEUE for _, effect, _ in done[0]):
        return turn(world, following, side)
    for room, effect, _ in done[0]:
        told = [facts for each in done for name, _, facts in each if name == room]
        if side == DECODE:
            following = _decode_did(world, state, following, room, effect, told)
        elif effect in (Effect.FENCE, Effect.STOP):
            following = over(following, room, CALLED_OFF, PREFILL)
    return following


def agree(
    world: World, side: int, ranks: tuple[int, ...], late: tuple[int, RoomId] | None
) -> tuple[Sequence[int], Sequence[tuple[Done, ...]]]:
    """What the ranks of a group are after a turn, and what each did in it."""
    key = (side, ranks, late)
    known = world.turns.get(key)
    if known is None:
        do = world.casts[side].do
        rooms = [late[1] if late is not None and late[0] == rank else None for rank in range(len(ranks))]
        ballots = [do(rank, ("ballot", room))[1] for rank, room in zip(ranks, rooms, strict=True)]
        agreed = tuple(map(min, zip(*ballots, strict=True)))
        after = [do(rank, ("turn", agreed, room)) for rank, room in zip(ranks, rooms, strict=True)]
        done = [each[1] for each in after]
        _check_alike(side, done)
        known = world.turns[key] = [each[0] for each in after], done
    return known


def deliver(world: World, state: State, message: Message, *, repeat: bool = False) -> State:
    """A command reaches all ranks. `repeat`: it is under way once more, and nobody reads this answer."""
    side, deed, *about = message
    do = world.casts[side].do
    after = [do(pair[side], (deed, *about)) for pair in state.pairs]
    answers = {answer for _, answer in after}
    if len(answers) > 1:
        raise Broken(Law.COMMANDS_ORDERED, f"ranks answer a {deed} with {sorted(answers)}")
    following = state._replace(pairs=replaced(state.pairs, side, [rank for rank, _ in after]))
    if repeat:
        return following
    following = following._replace(mail=following.mail - {message})
    (answer,) = answers
    if (side, deed) == (PREFILL, "open"):
        return accepted(following, about[0]) if not answer else following
    if deed == "grant" and answer:
        return _cancel_here(following, about[0])
    return following


def ask_close(world: World, state: State, close: Close) -> State:
    """The close reaches the sender. It is asked again until it is answered, so that it cannot be lost."""
    receiver = state.rooms[close.room - 1].peers[DECODE]
    message = (PREFILL, "close", close.room, receiver, close.generation)
    following = deliver(world, state, message, repeat=True)
    return _closes(following, close, close._replace(asked=ASKED))


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
    following = _closes(state, close, close._replace(asked=ACKNOWLEDGED))
    return following._replace(mail=following.mail | {quiet})


def must_close(told: Sequence[tuple[object, ...]]) -> bool:
    """Whether a failed room's sender is asked to be quiet: when any rank lacks a proof."""
    return any(told)


def _decode_did(
    world: World, before: State, state: State, room: RoomId, effect: Effect, told: list[tuple[object, ...]]
) -> State:
    match effect:
        case Effect.GRANT:
            return _grant(state, room, told)
        case Effect.ADMIT:
            _check_gate(world, before, state, room)
        case Effect.FENCE:
            state = over(state, room, CALLED_OFF, DECODE)
            if must_close(told):
                generation = next(facts[1] for facts in told if facts)
                return state._replace(closes=state.closes | {Close(room, int(str(generation)), WANTED)})
        case Effect.STOP:
            return over(state, room, CALLED_OFF, DECODE)
        case Effect.RELEASE:
            closes = frozenset(close for close in state.closes if close.room != room)
            return answered(state._replace(closes=closes), room)
        case _:
            pass
    return state


def _grant(state: State, room: RoomId, told: list[tuple[object, ...]]) -> State:
    if len(set(told)) > 1:
        raise Broken(Law.ADMISSION_AGREED, f"ranks reserve room {room} differently: {told}")
    peers = state.rooms[room - 1].peers
    if peers[PREFILL] != state.peers[PREFILL]:
        return _cancel_here(state, room)
    _, generation, pages, slot = told[0]
    message = (PREFILL, "grant", room, peers[DECODE], generation, pages, slot)
    return state._replace(mail=state.mail | {message})


def _cancel_here(state: State, room: RoomId) -> State:
    """The sender did not take the destination: decode's own leader ends the room."""
    if state.rooms[room - 1].peers[DECODE] != state.peers[DECODE]:
        return state
    return state._replace(mail=state.mail | {(DECODE, "cancel", room, CALLED_OFF)})


def _closes(state: State, close: Close, now: Close) -> State:
    return state._replace(closes=state.closes - {close} | {now})


def _check_alike(side: int, done: Sequence[tuple[Done, ...]]) -> None:
    """Every rank settles the same verdicts."""
    moves = [[(room, effect) for room, effect, _ in each] for each in done]
    if all(each == moves[0] for each in moves):
        return
    law = Law.APPLY_VERDICT
    if any(effect is Effect.FENCE for each in moves for _, effect in each):
        law = Law.FAILURE_IS_AGREED
    did = "; ".join(
        f"r{rank} {[f'{effect.value} room {room}' for room, effect in each] or 'nothing'}"
        for rank, each in enumerate(moves)
    )
    raise Broken(law, f"{SIDES[side]} ranks differ in one turn: {did}")


def _check_gate(world: World, before: State, after: State, room: RoomId) -> None:
    for rank, standing in enumerate(world.standings(before, DECODE)):
        if room not in standing.landed:
            raise Broken(
                Law.GATE_BEFORE_AGREE, f"room {room} is admitted, and on r{rank} not all of it has landed"
            )
