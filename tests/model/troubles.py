"""Troubles that can happen next, as far as the budget allows.

Each trouble is told of the side that it strikes, from what stands there and from what both sides share; one
that strikes neither alone is told with decode's.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from baton.handover.opener_messages import Break
from baton.ids import RoomId
from baton.rooms.receiver import UNDECIDED
from baton.transfer.transfer_protocol import PutState
from tests.model.cast import Deed
from tests.model.flights import exposed_before
from tests.model.leaving import died
from tests.model.registry import (
    abandoned,
    adopt,
    give_up,
    happens,
    lost,
    opener_died,
    orphaned,
    read_from,
    running,
)
from tests.model.scopes import TROUBLES
from tests.model.stream import ON_THE_STREAM, broke, link_of, stream_of
from tests.model.turns import connect, deliver, lag, turn
from tests.model.world import (
    DEAD,
    DECODE,
    PREFILL,
    UNISSUED,
    Message,
    State,
    World,
    one_rank,
)

Label = tuple[Any, ...]
"""A verb and what it is about."""
Make = Callable[[State], State]
Possible = tuple[Label, Make, bool]
"""Label of an event, its function from state to state, and whether it is no trouble."""
Steps = Iterator[tuple[Label, Make]]


REVOKE: Final[Message] = (DECODE, "revoke")


def troubles(world: World, state: State, side: int) -> Steps:
    if side == DECODE and state.stalled:  # never to be relied on
        yield ("wake",), lambda before: before.with_stalled(False)
    if not any(state.left):
        return
    for index, trouble in enumerate(TROUBLES):
        if state.left[index]:
            left = (*state.left[:index], state.left[index] - 1, *state.left[index + 1 :])
            for label, make in _OF[trouble](world, state, side):
                yield label, _spending(left, make)


def _spending(left: tuple[int, ...], make: Make) -> Make:
    return lambda state: make(state.with_left(left))


def _aborts(world: World, state: State, side: int) -> Steps:
    for room in running(world, state) if side == DECODE else ():
        yield ("abort", room), partial(give_up, world, room=room)


def _ends(world: World, state: State, side: int) -> Steps:
    for room in running(world, state) if side == DECODE else ():
        for choice in range(world.scope.choices):
            yield ("enough", room, choice), partial(_enough, world, room=room, choice=choice)


def _enough(world: World, state: State, room: RoomId, choice: int) -> State:
    return happens(world, state, room, "end_choice", choice)


def _told(state: State, message: Message) -> State:
    return state.send(message)


def _orphans(world: World, state: State, side: int) -> Steps:
    for room in running(world, state) if side == DECODE else ():
        yield ("orphan", room), partial(orphaned, world, room=room)


def _opener_deaths(world: World, state: State, side: int) -> Steps:
    for room in running(world, state) if side == DECODE else ():
        yield ("opener dies", room), partial(opener_died, world, room=room)


def _adoptions(world: World, state: State, side: int) -> Steps:
    for index, entry in enumerate(state.rooms if side == DECODE else ()):
        if entry.opener == DEAD and entry.peers == state.peers:
            yield ("adopt", RoomId(index + 1)), partial(adopt, world, room=RoomId(index + 1))


def _silences(world: World, state: State, side: int) -> Steps:
    if side == DECODE and lease_ends(world, state):
        yield ("silence",), partial(silence, world)


def lease_ends(world: World, state: State) -> bool:
    rooms = read_from(world, state, PREFILL, state.peers[PREFILL])
    return any(world.is_running(state.rooms[room - 1]) for room in rooms)


def silence(world: World, state: State) -> State:
    """Return the state after the prefill worker's lease ran out. Its rooms fail, and nothing is proven."""
    return lost(world, state, PREFILL, state.peers[PREFILL], None)


def _losses(world: World, state: State, side: int) -> Steps:
    for message in state.mail if side == DECODE else ():
        if message[1] in ("depart", "revoke", "connected", "compute_here", "quiet", "orphan", *ON_THE_STREAM):
            continue  # told again with every lease renewal, or the leader's own; a stream breaks as a whole
        yield ("lose", message), partial(_lose, world, message=message)
    if side == DECODE and link_of(world, state).waits:
        yield ("break",), partial(broke, world)


def _lose(world: World, state: State, message: Message) -> State:
    state = misses(world, state, message)
    return state.take(message)


def is_missed(message: Message) -> bool:
    """Return whether a caller waits for the answer to this message and acts if none comes."""
    return message[1] in ("open", "adopt")


def misses(world: World, state: State, message: Message) -> State:
    """Return the state after the sender of a message gives up waiting for the answer. The message may have
    arrived, or arrive later. An open whose caller is gone is not obeyed."""
    side, deed, room, *_ = message
    if deed not in ("open", "adopt"):
        return state
    if deed == "adopt" and message[3] != state.rooms[room - 1].owner:
        return state.take(message)  # its sender is dead
    return happens(world, state.take(message), room, "broken", side, Break.LOST)


def _claims(world: World, state: State, side: int) -> Steps:
    leader = world.standings(state, side)[0]
    for room, at in leader.rooms.items() if side == DECODE else ():
        message: Message = (DECODE, "compute_here", room)
        if at.phase in UNDECIDED and room not in leader.local and message not in state.mail:
            yield ("claim", room), partial(_told, message=message)


def _stalls(world: World, state: State, side: int) -> Steps:
    if side == DECODE and not state.stalled:
        yield ("stall",), lambda before: before.with_stalled(True)


def revokable(world: World, state: State) -> bool:
    """Return whether the leader waits for a proof or is shut out, and has not revoked the memory yet."""
    leader = world.standings(state, DECODE)[0]
    return (
        (leader.overdue or link_of(world, state).is_shut_out)
        and not leader.revoking
        and REVOKE not in state.mail
    )


revoke = partial(_told, message=REVOKE)


def _revocations(world: World, state: State, side: int) -> Steps:
    if side == DECODE and revokable(world, state):
        yield ("revoke",), revoke


def _drains(world: World, state: State, side: int) -> Steps:
    if state.draining is None:
        yield ("drain", side), partial(_drain, world, side=side)


def _drain(world: World, state: State, side: int) -> State:
    book, _ = world.books.do(state.book, ("drain", side, state.peers[side]))
    return state.with_book(book).with_draining(side)


def _forgets(world: World, state: State, side: int) -> Steps:
    """Yield the event in which all ranks of a worker forget remembered rooms. A grant under way excludes it,
    since it may find a room that its close had cancelled."""
    if side not in awake(state) or (side == PREFILL and _grants(world, state)):
        return
    yield ("forget", side), partial(_forget, world, side=side)


def _grants(world: World, state: State) -> bool:
    """Return whether a grant is under way, or waits for its room."""
    return bool(stream_of(world, state).early) or any(message[1] == "grant" for message in state.mail)


def _forget(world: World, state: State, side: int) -> State:
    for rank in range(len(state.ranks(side))):
        state = one_rank(world, state, side, rank, ("forget",))
    return state


def _repeats(world: World, state: State, side: int) -> Steps:
    for message in bound_for(state, side):
        if (side == PREFILL and state.stalled) or waits(state, message[0]) or message[1] == "close":
            continue  # (a close is repeated until it is answered)
        yield ("repeat", message), partial(deliver, world, message=message, repeat=True)


def bound_for(state: State, side: int) -> list[Message]:
    """Messages to a side; to the bootstrap with decode's. What a bootstrap sends behind its wish to adopt a
    room comes behind it, on one stream."""
    adopted = {(each[0], *each[2:4]) for each in state.mail if each[1] == "adopt"}
    return [
        each
        for each in state.mail
        if (each[0] == PREFILL) == (side == PREFILL)
        and not (adopted and each[1] == "cancel" and (each[0], each[2], each[-1]) in adopted)
    ]


def _strays(world: World, state: State, side: int) -> Steps:
    if side != DECODE or PREFILL not in awake(state):
        return
    present = world.standings(state, DECODE)[0].exposure
    if present is not None:
        message = (PREFILL, "connect", state.peers[DECODE], exposed_before(present), False)
        yield ("stray", message), partial(connect, world, message=message, repeat=True)


def _failures(world: World, state: State, side: int) -> Steps:
    for rank, standing in enumerate(world.standings(state, side) if side in alive(state) else ()):
        for room in (*standing.rooms, *sorted(standing.past)):
            fails: Deed = ("fail", room)
            yield ("fail", side, rank, room), partial(one_rank, world, side=side, rank=rank, deed=fails)
    for rank, standing in enumerate(world.standings(state, PREFILL) if side == PREFILL else ()):
        for flight in standing.flying:
            ended: Deed = ("ended", flight.number, PutState.FAILED)
            yield ("put fails", rank, flight), partial(one_rank, world, side=side, rank=rank, deed=ended)


def _reports(world: World, state: State, side: int) -> Steps:
    if side == PREFILL:
        yield ("report",), partial(_registry_does, world, deed=("report", PREFILL, state.peers[PREFILL]))


def _namesakes(world: World, state: State, side: int) -> Steps:
    holders = world.books.standings[state.book].holders
    if side == PREFILL and not any(holder == PREFILL for holder, _ in holders):
        yield ("namesake",), partial(_registry_does, world, deed=("namesake", PREFILL))


def _registry_does(world: World, state: State, deed: Label) -> State:
    book, _ = world.books.do(state.book, deed)
    return state.with_book(book)


def _misconnects(world: World, state: State, side: int) -> Steps:
    for message in state.mail if side == PREFILL and PREFILL in awake(state) else ():
        if message[1] == "connect":
            for rank in range(len(state.senders)):
                yield ("misconnect", message, rank), partial(_misconnect, world, message=message, rank=rank)


def _misconnect(world: World, state: State, message: Message, rank: int) -> State:
    return connect(world, state.take(message), message, unreached=rank)


def _rumours(world: World, state: State, side: int) -> Steps:
    for index, entry in enumerate(state.rooms):
        room = RoomId(index + 1)
        for rank, standing in enumerate(world.standings(state, side)):
            if entry.opener == UNISSUED or room in standing.rooms or room in standing.past:
                continue
            deed: Deed = ("fail", room)
            yield ("fail", side, rank, room), partial(one_rank, world, side=side, rank=rank, deed=deed)


def _expiries(world: World, state: State, side: int) -> Steps:
    for rank, standing in enumerate(world.standings(state, side) if side in awake(state) else ()):
        for room in standing.rooms:
            yield ("turn", side, (rank, room)), partial(turn, world, side=side, late=(rank, room))
    if side == DECODE and world.scope.registry and world.books.standings[state.book].overdue:
        yield ("overdue",), partial(abandoned, world)


def alive(state: State) -> tuple[int, ...]:
    return (DECODE,) if state.stalled else (PREFILL, DECODE)


def waits(state: State, side: int) -> bool:
    """Return whether the worker's last rank has not ended the turn before. Until then the worker takes no
    turn or command."""
    return state.lag is not None and state.lag[0] == side


def awake(state: State) -> tuple[int, ...]:
    return tuple(side for side in alive(state) if not waits(state, side))


def _lags(world: World, state: State, side: int) -> Steps:
    count = len(state.ranks(side)) if state.lag is None and side in awake(state) else 0
    for rank in range(count) if count > 1 else ():
        yield ("lag", side, rank), partial(lag, world, side=side, rank=rank)


def _sender_deaths(world: World, state: State, side: int) -> Steps:
    if side == PREFILL:
        yield ("die", PREFILL), partial(died, world, side=PREFILL)


def _receiver_deaths(world: World, state: State, side: int) -> Steps:
    if side == DECODE:
        yield ("die", DECODE), partial(died, world, side=DECODE)


_OF: dict[str, Callable[[World, State, int], Steps]] = {
    "aborts": _aborts,
    "silences": _silences,
    "losses": _losses,
    "repeats": _repeats,
    "failures": _failures,
    "rumours": _rumours,
    "expiries": _expiries,
    "sender_deaths": _sender_deaths,
    "receiver_deaths": _receiver_deaths,
    "stalls": _stalls,
    "revocations": _revocations,
    "orphans": _orphans,
    "opener_deaths": _opener_deaths,
    "adoptions": _adoptions,
    "drains": _drains,
    "forgets": _forgets,
    "lags": _lags,
    "strays": _strays,
    "reports": _reports,
    "namesakes": _namesakes,
    "misconnects": _misconnects,
    "ends": _ends,
    "claims": _claims,
}
