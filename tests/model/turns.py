"""Deeds of a worker with all its ranks: take a turn, obey a command.

The laws that a single rank cannot see are checked here: all ranks do the same, and none admits a room that
is not there on every rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from baton.ids import RoomId
from baton.rooms.errors import Reason
from baton.rooms.phases import AnyEffect, Effect, Phase, ReceiverEffect, SenderEffect
from tests.model.cast import Deed, Waits
from tests.model.flights import leaders
from tests.model.laws import Broken, Law
from tests.model.leaving import left
from tests.model.rank import Done, Met, TurnResult
from tests.model.registry import CALLED_OFF, SENT, adopted, answered, ended_here, gave_back, received
from tests.model.registry import opened as opened_here
from tests.model.standing import Standing
from tests.model.stream import (
    ON_THE_STREAM,
    arrives,
    claim,
    close,
    command,
    exposed_anew,
    grant,
    linked,
    opened,
    streamed,
)
from tests.model.world import (
    BOOTSTRAP,
    DECODE,
    PREFILL,
    SIDES,
    Message,
    State,
    World,
    one_rank,
)

LOSSES: Final = frozenset({Reason.PREFILL_LOST, Reason.DECODE_LOST})
RowResult = tuple[Sequence[int], Sequence[tuple[Done, ...]], tuple[str, ...], Met]


def turn(world: World, state: State, side: int, late: tuple[int, RoomId] | None = None) -> State:
    """Run one turn on every rank: collect evidence, vote, agree, act, compute. `late`: (rank, room) whose
    deadline has passed there. A turn that did no more than queue rooms is taken together with the next."""
    return taken(world, state, side, late)[0]


def taken(
    world: World, state: State, side: int, late: tuple[int, RoomId] | None = None
) -> tuple[State, tuple[str, ...]]:
    """Return the state after a turn, and the leader's answers to callers that wait for its end."""
    ranks, done, answers, _ = agree(world, side, state.ranks(side), late)
    return _did(world, state, side, ranks, done), answers


def _did(
    world: World, state: State, side: int, ranks: Sequence[int], done: Sequence[tuple[Done, ...]]
) -> State:
    following = state.with_ranks(side, ranks)
    if following.ranks(side) == state.ranks(side):
        return state
    if done[0] and all(effect is Effect.QUEUE for _, effect, _ in done[0]):
        return turn(world, following, side)
    if side == DECODE:
        leader = world.standings(state, DECODE)[0]
        for room in sorted(leader.answered):
            following = answered(world, following, room, room in leader.local)
    for room, effect, _ in done[0]:
        if effect in (Effect.FENCE, Effect.STOP):
            _check_told(world, state, following, side, room)
            following = _failed(world, following, side, room)
        if side == DECODE:
            told = [facts for each in done for name, did, facts in each if (name, did) == (room, effect)]
            following = _decode_did(world, state, following, room, effect, told)
        if effect is SenderEffect.REPORT:
            _check_sent(world, state, room)
            following = received(world, following, room, PREFILL, *SENT)
        if effect is Effect.RELEASE:
            following = gave_back(world, following, room, side)
    if side == DECODE and _moved(world, state, following):
        following = exposed_anew(world, following)
    return left(world, following, side) if world.standing(side, ranks[0]).left else following


def _failed(world: World, state: State, side: int, room: RoomId) -> State:
    """Return the state after a room ended early on a worker, which reports why to the bootstrap."""
    entry, at = state.rooms[room - 1], world.standings(state, side)[0].at(room)
    reason = CALLED_OFF if at is None or at.cause is None else at.cause.reason
    if world.scope.drains_only and reason in LOSSES and world.is_running(entry):
        raise Broken(
            Law.DRAIN_KEEPS_PROMISES, f"room {room} ends for {reason.value}, and that worker had finished it"
        )
    return ended_here(world, state, room, side, reason)


def _check_told(world: World, before: State, after: State, side: int, room: RoomId) -> None:
    """Check that a prefill room that will not be granted, because decode computes it, is told so before its
    deadline."""
    budget, entry = world.scope.budget, before.rooms[room - 1]
    if side == DECODE or not budget.claims or budget.silences or world.scope.ways:
        return  # who is called off may be told that it was late
    if not world.is_over(entry):
        return
    was, now = (world.standings(state, PREFILL)[0].at(room) for state in (before, after))
    late = now is not None and now.cause is not None and now.cause.reason is Reason.DEADLINE
    if late and was is not None and was.phase is Phase.BOOTSTRAPPING:
        raise Broken(Law.MINE_OR_GRANTED, f"room {room} is answered, and prefill has waited for a grant")


def _moved(world: World, before: State, after: State) -> bool:
    return world.standings(before, DECODE)[0].exposure != world.standings(after, DECODE)[0].exposure


def agree(world: World, side: int, ranks: tuple[int, ...], late: tuple[int, RoomId] | None) -> RowResult:
    """Run a turn of a group. Returns its ranks, each rank's deeds, the leader's replies and the results of
    its collectives. What follows from these is the product's `Turn`."""
    key = (side, ranks, late)
    known = world.turns.get(key)
    if known is None:
        do = world.casts[side].do
        rooms = [late[1] if late is not None and late[0] == rank else None for rank in range(len(ranks))]
        met: Met = ()
        after = _on_all(do, ranks, rooms, met)
        while any(isinstance(each, Waits) for _, each in after):
            _check_wait_alike(side, [each for _, each in after])
            sent = [each.sent for _, each in after]
            met = (*met, tuple(sent) if met else tuple(map(min, zip(*sent, strict=True))))
            after = _on_all(do, ranks, rooms, met)
        done = [each[1][0] for each in after]
        _check_alike(side, done)
        if side == DECODE:
            _check_memory_alike([world.standing(DECODE, each[0]) for each in after])
        known = world.turns[key] = [each[0] for each in after], done, after[0][1][1], met
    return known


def _on_all(
    do: Callable[[int, Deed], tuple[int, Any]],
    ranks: Sequence[int],
    rooms: Sequence[RoomId | None],
    met: Met,
) -> list[tuple[int, Any]]:
    """Let each rank take its turn as far as the results of the collectives reach. `rooms`: the late room of
    each rank."""
    return [do(rank, ("turn", room, *met)) for rank, room in zip(ranks, rooms, strict=True)]


def lag(world: World, state: State, side: int, rank: int) -> State:
    """Return the state after a turn that one rank has not carried out yet. It does so at any later time
    before the next turn."""
    ranks, done, _, met = agree(world, side, state.ranks(side), None)
    if world.standing(side, ranks[0]).left or not (done[0] or world.scope.grows):
        return state  # nothing that anyone could notice
    if side == DECODE and _moved(world, state, state.with_ranks(side, ranks)):
        return state  # no rank is ahead: such a turn ends when all have told where their memory is
    if done[0] and all(effect is Effect.QUEUE for _, effect, _ in done[0]):
        return lag(world, state.with_ranks(side, ranks), side, rank)
    following = _did(world, state, side, ranks, done)
    acted = list(following.ranks(side))
    acted[rank] = state.ranks(side)[rank]
    return following.with_ranks(side, acted).with_lag((side, rank, met))


def catch_up(world: World, state: State) -> State:
    if state.lag is None:
        return state
    side, rank, met = state.lag
    return one_rank(world, state, side, rank, ("turn", None, *met)).with_lag(None)


def deliver(world: World, state: State, message: Message, *, repeat: bool = False) -> State:
    """Deliver a message to the bootstrap, or a command to all ranks. `repeat`: the message stays under way,
    and this answer is not read."""
    side, deed, *about = message
    following = state if repeat else state.take(message)
    if side == BOOTSTRAP:
        return following.with_book(world.books.do(state.book, (deed, *about))[0])
    if deed == "connect":
        return connect(world, following, message, repeat=repeat)
    if deed in ON_THE_STREAM:
        return arrives(world, following, message, repeat=repeat)
    answer, following = command(world, following, side, deed, *about)
    if deed == "open":
        following = opened_here(world, following, about[0], side, answer)
    if deed == "adopt" and not repeat:
        _check_adoption(world, state, side, message, answer)
        return adopted(world, following, about[0], side, answer, about[1])
    if repeat:
        return following
    match deed:
        case "open" if answer:
            return following
        case "open" if side == DECODE:
            return opened(world, following, *about)
        case "open":
            return streamed(world, following, "opened", about[0])
        case "compute_here" if answer:
            return claim(world, following, about[0])
        case _:
            return following


def _check_adoption(world: World, before: State, side: int, message: Message, answer: str) -> None:
    """Check that decode gives a room only to the first bootstrap that wants it once its own is dead."""
    _, _, room, owner, _ = message
    at = world.standings(before, side)[0].at(room)
    if answer or at is None or side == PREFILL:
        return
    if not at.orphan:
        raise Broken(Law.ADOPT_FIRST_WINS, f"bootstrap {owner} gets room {room}, which {at.opener} reads")


def connect(
    world: World, state: State, message: Message, *, repeat: bool = False, unreached: int | None = None
) -> State:
    """Return the state after all ranks connected and agreed in that turn on the result, which is then
    answered. `unreached`: the rank that cannot reach the receiver's memory."""
    _, _, receiver, exposure, is_present = message
    do = world.casts[PREFILL].do
    reached = world.reached(state)
    deeds = [
        ("connect", receiver, exposure, reached, rank != unreached) for rank in range(len(state.senders))
    ]
    after = [do(rank, deed) for rank, deed in zip(state.senders, deeds, strict=True)]
    following, (answer,) = taken(world, state.with_ranks(PREFILL, [rank for rank, _ in after]), PREFILL)
    for rank, (_, problem) in enumerate(after):
        if problem and not answer:
            raise Broken(Law.APPLY_VERDICT, f"a connect is answered as made, and on r{rank} it was not")
    if repeat or not is_present or receiver != state.peers[DECODE]:
        return following
    return linked(world, following, "connect_answered", exposure, answer)


def _decode_did(
    world: World, before: State, state: State, room: RoomId, effect: AnyEffect, told: list[tuple[object, ...]]
) -> State:
    match effect:
        case ReceiverEffect.GRANT if any(told) and world.is_local(state.rooms[room - 1]):
            raise Broken(Law.MINE_OR_GRANTED, f"room {room} is granted, and its sender was told otherwise")
        case ReceiverEffect.GRANT if any(told):
            return grant(world, state, room, told)
        case ReceiverEffect.ADMIT:
            _check_gate(world, before, state, room)
        case Effect.FENCE:
            return close(world, state, room, told)
        case Effect.RELEASE:
            return linked(world, state, "over", room)
        case _:
            pass
    return state


def _check_wait_alike(side: int, answers: Sequence[Waits | TurnResult]) -> None:
    """Check that no rank waits for the others in a collective that they do not reach."""
    waiting = [rank for rank, each in enumerate(answers) if isinstance(each, Waits)]
    if len(waiting) < len(answers):
        raise Broken(Law.SAME_TURNS, f"{SIDES[side]} ranks {waiting} wait for the others, which go on")


def _check_alike(side: int, done: Sequence[tuple[Done, ...]]) -> None:
    """Check that every rank settles the same verdicts."""
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


def _check_memory_alike(ranks: Sequence[Standing]) -> None:
    """Check that every rank's memory has the same exposure and is divided among rooms in the same way."""
    if len({leaders(each.exposure) for each in ranks if each.exposure is not None}) > 1:
        raise Broken(Law.APPLY_VERDICT, "one rank alone took its memory back")
    if any(each.local != ranks[0].local for each in ranks):
        rooms = [sorted(each.local) for each in ranks]
        raise Broken(Law.MINE_OR_GRANTED, f"of which rooms are computed here ranks differ: {rooms}")
    if any(each.tables != ranks[0].tables for each in ranks):
        told = "; ".join(f"r{rank} {list(each.tables)}" for rank, each in enumerate(ranks))
        raise Broken(Law.GROWTH_IS_AGREED, f"of (room, its pages, whether retracted) ranks differ: {told}")


def _check_gate(world: World, before: State, after: State, room: RoomId) -> None:
    for rank, standing in enumerate(world.standings(before, DECODE)):
        if room not in standing.landed:
            raise Broken(
                Law.GATE_BEFORE_AGREE, f"room {room} is admitted, and on r{rank} not all of it has landed"
            )


def _check_sent(world: World, state: State, room: RoomId) -> None:
    """Check that everything reported as sent was announced to every rank that waits for it."""
    if world.scope.budget.forgets:
        return  # who waits may be another room of the same id, of which nothing was sent
    for rank, standing in enumerate(world.standings(state, DECODE)):
        at = standing.at(room)
        waits = at is not None and at.phase is Phase.TRANSFERRING and at.cause is None
        if waits and room not in standing.sealed:
            raise Broken(
                Law.GATE_BEFORE_AGREE, f"room {room} is reported as sent, and r{rank} has no seal of it"
            )
