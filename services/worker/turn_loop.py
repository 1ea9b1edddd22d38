"""Turn loop of a rank: the actions of every rank in each turn, in the same order.

    apply commands  ->  observe  ->  vote  ->  agree  ->  act  ->  compute

All ranks run the same turns in the same order (`same-turns`). Each turn has exactly one broadcast and one
agreement, so that no rank waits for a collective that its peers never reach. Leaving is voted, too.
Anything else that ranks exchange is gathered at the end of a turn that all of them know to need it. A turn
is short. A step of the model runs in parallel on its own thread, and starts only when the engine of
every rank is free.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from baton.handover.turn import Lap, Turn
from baton.parallel.rank_group import GroupBroken, RankGroup
from baton.rooms.ballot import Ballot
from baton.rooms.errors import RostersDiverged
from baton.rooms.phases import Vote
from baton.rooms.roster import Capacity, Roster
from baton.runtime.clock import Clock
from baton.runtime.logging import Log
from baton.worker.loop_share import LoopShare, TimedGroup
from baton.worker.pending_events import PendingEvents

log = Log(__name__)

BEHIND_S: Final = 0.001
"""Seconds from a turn of the leader to its next one, if the leader has evidence (such as a finished write)
that another rank lacks."""


class Work(Protocol):
    """Work of a prefill or decode rank in each turn, as the turn loop calls it. Only `rest` and `pause`
    wait."""

    @property
    def roster(self) -> Roster[Any]: ...

    def take_commands(self) -> bytes:
        """Return the serialised commands for this turn, in the order in which they came. Called on the leader
        only."""

    def apply(self, commands: bytes) -> None:
        """Apply the commands of the turn, the same on every rank."""

    def observe(self) -> bool:
        """Collect what this rank can observe: landed data, finished writes and finished steps. Return whether
        the next turn may find more at once."""

    def capacity(self) -> Capacity: ...

    def may_compute(self) -> bool:
        """Return whether the engine of this rank is free to start a step."""

    def may_leave(self) -> bool:
        """Return whether this rank is draining and has no room left."""

    def connects(self) -> int:
        """Return how many connects to decode memory succeeded on this rank in this turn, before the first
        that failed."""

    def on_agreement(self, connects: int) -> None:
        """React to the end of the ranks' vote. It shows that every rank has carried out the requests of the
        turn before.

        `connects`: number of connects of this turn that succeeded on every rank. Their callers get the
        result.
        """

    def record_vote(self, room: Any, wish: Vote, now_ms: int) -> None:
        """Report this rank's vote to the room's timeline: a vote to end the room, or to advance it while
        another rank does not. Called in every such turn."""

    def perform(self, room: Any, effect: Any) -> None:
        """Carry out the effect of a room's move on which all ranks have agreed. `effect`: one of the effects
        of this side."""

    def compute(self) -> bool:
        """Start the next engine step, if there is something to compute. The end of the step wakes a waiting
        loop.

        Return whether the next turn already has something to do before that.
        """

    def gather_payload(self) -> bytes | None:
        """Return bytes that every rank needs from this rank once, or None. In a turn, all ranks return bytes
        or all return None."""

    def on_gathered(self, payload: Sequence[bytes]) -> None:
        """Process the gathered data of all ranks, in rank order."""

    def record(self, agreement_s: float) -> None:
        """Publish the metrics of this turn. `agreement_s`: seconds that the ranks' vote took."""

    async def rest(self) -> bool:
        """Wait until a turn may have something to do, at most for a bounded time. Return whether an event
        arrived."""

    async def pause(self, most_s: float) -> None:
        """Wait until an event comes from outside, such as a command. Wait at most `most_s` seconds."""


class TurnProgress:
    """Record of when the last turn ended and when the engine was last free. Health pages read it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.turn = 0
        self._ended_ms: int | None = None
        self._free_ms = 0

    def ended(self, *, free: bool) -> None:
        """Record the end of a turn. `free`: whether this rank's engine was free in it."""
        self.turn += 1
        self._ended_ms = self._clock.now_ms()
        if free:
            self._free_ms = self._ended_ms

    def stuck_ms(self) -> int | None:
        """Return the milliseconds since the last turn ended, or None before the first turn has ended."""
        return None if self._ended_ms is None else self._clock.now_ms() - self._ended_ms

    def step_ms(self) -> int:
        """Return an upper bound on the milliseconds for which the present step has been running."""
        return 0 if self._ended_ms is None else self._ended_ms - self._free_ms


async def run_turns(
    work: Work,
    group: RankGroup,
    clock: Clock,
    progress: TurnProgress,
    arrivals: PendingEvents,
    behind_s: float = BEHIND_S,
) -> None:
    """Take turns until all ranks agree to leave. `arrivals`: events of the loop that this runs in.

    Only the leader rests, since only the leader is woken from outside. The other ranks wait for it in the
    broadcast. Nothing wakes the leader when another rank has evidence that it lacks. It takes the next turn
    after `behind_s` seconds, or as soon as an event comes from outside. Between two turns of the leader the
    gRPC handlers have their share of the loop (`LoopShare`). The other ranks serve no calls.
    """
    await _gather(work, group)
    group = TimedGroup(group, clock)
    share = LoopShare(clock, arrivals, group)
    while (lap := await take_turn(work, group, clock, progress)) is not Lap.LAST:
        if lap is Lap.QUEUED:
            continue  # bounded: rooms are queued by commands only, and handlers enter none meanwhile
        if group.rank:
            await asyncio.sleep(0)
            continue
        share.turned()
        if lap is Lap.BEHIND:
            await work.pause(behind_s)
        elif lap is Lap.IDLE and await work.rest():
            arrivals.came()
        await share.give()


async def take_turn(work: Work, group: RankGroup, clock: Clock, progress: TurnProgress) -> Lap:
    """Take one turn. Its order is that of `baton.handover.turn`. Raises GroupBroken, and the error of any
    bug, after which the worker ends."""
    is_leader = group.rank == 0
    work.apply(await group.broadcast(work.take_commands() if is_leader else None))
    found = work.observe()
    now_ms = clock.now_ms()
    turn = Turn(
        progress.turn,
        work.roster,
        now_ms,
        work.capacity(),
        ranks=group.size,
        may_compute=work.may_compute(),
        may_leave=work.may_leave(),
        connects=work.connects(),
    )
    agreement_s = await _agree(group, turn)
    work.on_agreement(turn.verdict.connects)
    for room, vote in turn.dissents():
        work.record_vote(room, vote, now_ms)
    causes = turn.causes()
    for room, effect in turn.settle(() if causes is None else await group.gather(causes)):
        log.debug("moved", turn=progress.turn, room=room.id, effect=effect.value)
        work.perform(room, effect)
    more = turn.computes and work.compute()
    await _gather(work, group)
    work.record(agreement_s)
    progress.ended(free=turn.ballot.may_compute)
    return turn.end(found=found, more=more)


async def _agree(group: RankGroup, turn: Turn[Any]) -> float:
    """Agree with the other ranks on the turn's verdict. Return the seconds that it took. Raises
    RostersDiverged, with what each rank has."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    least = await group.agree(turn.ballot.encode())
    agreement_s = loop.time() - started
    try:
        turn.agree(least)
    except RostersDiverged as error:
        raise RostersDiverged(f"{error}: {await _who_holds_what(group, turn.ballot)}") from error
    return agreement_s


async def _gather(work: Work, group: RankGroup) -> None:
    payload = work.gather_payload()
    if payload is not None:
        work.on_gathered(await group.gather(payload))


async def _who_holds_what(group: RankGroup, mine: Ballot) -> str:
    """Return a text that names each rank's turn and digest of its rooms, for the error of diverged rosters.

    All ranks detect the difference from the same numbers, so all of them call this before they end. An error
    of the group during the call is not the cause.
    """
    ranks: dict[str, list[str]] = {}
    try:
        each = await group.gather(f"turn {mine.turn}, digest {mine.digest:#x}".encode())
    except GroupBroken as error:
        return f"which rank holds which is not known ({error})"
    with suppress(GroupBroken):
        await group.gather(b"")  # no rank leaves before all have the data
    for rank, payload in enumerate(each):
        ranks.setdefault(payload.decode(), []).append(str(rank))
    return "; ".join(f"rank {', '.join(each)}: {payload}" for payload, each in ranks.items())
