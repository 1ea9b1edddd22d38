"""What does every rank do each turn, in the same order?

    apply commands  ->  observe  ->  vote  ->  agree  ->  act  ->  compute

All ranks run the same turns in the same order (`same-turns`), and each turn holds exactly one broadcast and
one agreement, so that no rank can wait on a collective its peers will not reach. That holds for stopping
too: leaving is voted. What else the ranks have to tell each other they gather at the end of a turn that
all of them know to need it. A turn is short; a step of the model runs beside the turns, on its own thread,
and starts only when every rank's engine is free.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, Final, Protocol

from baton.ids import RoomId
from baton.parallel.rank_group import GroupBroken, RankGroup
from baton.rooms.ballot import Ballot, Verdict, read_verdict
from baton.rooms.errors import Cause, RostersDiverged
from baton.rooms.evidence import Failed
from baton.rooms.phases import Effect, ReceiverEffect, Vote
from baton.rooms.roster import Capacity, Roster
from baton.runtime.clock import Clock
from baton.runtime.logging import Log
from baton.runtime.pending_events import PendingEvents
from baton.worker.loop_share import LoopShare, TimedGroup

log = Log(__name__)

BEHIND_S: Final = 0.001
"""How soon the leader looks again when another rank was behind."""

WORDS_MAX: Final = 300
ROOMS_MAX: Final = 512
"""Of how many rooms that end in one turn each rank says why, in so many characters: what is beyond ends with
the reason alone."""


class Work(Protocol):
    """What one side does in its turns. Nothing here waits, but for `rest`."""

    @property
    def roster(self) -> Roster[Any]: ...

    def take_commands(self) -> bytes:
        """The leader's: what came in since the last turn, in order."""

    def apply(self, commands: bytes) -> None:
        """Carry out the turn's commands: the same on every rank."""

    def observe(self) -> bool:
        """Note what has landed, ended or been computed. True when the next turn may see more at once."""

    def capacity(self) -> Capacity: ...

    def may_compute(self) -> bool:
        """The engine is free."""

    def may_leave(self) -> bool:
        """Draining, and nothing is held."""

    def connects(self) -> int:
        """How many of the turn's connections, from the first on, this rank could make."""

    def on_agreement(self, connects: int) -> None:
        """All ranks have reached this turn, and so have done what the one before asked of them. So many of
        the turn's connections every rank could make: whoever asked is answered."""

    def record_vote(self, room: Any, wish: Vote, now_ms: int) -> None:
        """This rank wishes that the room end, or that it go on while another does not. In every such turn."""

    def perform(self, room: Any, effect: Any) -> None:
        """Do what a settled move asks of the world. `effect`: one of this side's."""

    def compute(self) -> bool:
        """Start the next step, if there is one: its end wakes whoever rests. True when the next turn has
        something to do before that."""

    def gather_payload(self) -> bytes | None:
        """What every rank is to know of this one, once. None on all ranks or on none."""

    def on_gathered(self, told: Sequence[bytes]) -> None:
        """What every rank told, by rank."""

    def record(self, agreement_s: float) -> None:
        """Publish the turn's census."""

    async def rest(self) -> bool:
        """Wait, within a bound, until a turn may have something to do. True when something has come."""

    async def pause(self, most_s: float) -> None:
        """Wait for what comes from outside, and no longer than `most_s`."""


class TurnProgress:
    """When the last turn ended, and when the engine was last free, for an honest health page."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.turn = 0
        self._ended_ms: int | None = None
        self._free_ms = 0

    def ended(self, *, free: bool) -> None:
        """`free`: this rank's engine was, between two steps or resting."""
        self.turn += 1
        self._ended_ms = self._clock.now_ms()
        if free:
            self._free_ms = self._ended_ms

    def stuck_ms(self) -> int | None:
        """Milliseconds since a turn last ended; None before the first has."""
        return None if self._ended_ms is None else self._clock.now_ms() - self._ended_ms

    def step_ms(self) -> int:
        """Milliseconds for which a step has been running, at most; turns go on beside it."""
        return 0 if self._ended_ms is None else self._ended_ms - self._free_ms


class Lap(Enum):
    """What a turn was like."""

    QUEUED = "queued"
    """Rooms have all but the capacity for the next move, which the next turn sees: before anything else."""
    BUSY = "busy"
    """Something moved, or there is more to see: the next turn may go on at once."""
    BEHIND = "behind"
    """Nothing, but another rank has not seen yet what this one has: soon."""
    IDLE = "idle"
    LAST = "last"
    """All ranks agreed to leave."""


async def run_turns(
    work: Work,
    group: RankGroup,
    clock: Clock,
    progress: TurnProgress,
    arrivals: PendingEvents,
    behind_s: float = BEHIND_S,
) -> None:
    """Turn until all ranks agree to leave. `arrivals`: of the loop that this runs in.

    Only the leader rests, since only the leader is woken from outside. The other ranks wait for it in the
    broadcast. Nothing wakes the leader when another rank has evidence that it lacks: it turns again after
    `behind_s` seconds, or as soon as something comes from outside. Between two turns of the leader the gRPC
    handlers have their share of the loop (`LoopShare`). The other ranks serve no calls.
    """
    await _gather(work, group)
    group = TimedGroup(group, clock)
    share = LoopShare(clock, arrivals, group)
    while (lap := await take_turn(work, group, clock, progress)) is not Lap.LAST:
        if lap is Lap.QUEUED:
            continue  # bounded: none comes to a queue but by a command, and handlers enter none meanwhile
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
    """One turn. Raises GroupBroken, and what only a bug raises: the worker ends."""
    is_leader = group.rank == 0
    work.apply(await group.broadcast(work.take_commands() if is_leader else None))
    news = work.observe()
    now_ms = clock.now_ms()
    capacity = work.capacity()
    votes = work.roster.votes(now_ms, capacity)
    digest = work.roster.digest(capacity)
    reasons = work.roster.reasons(now_ms, votes)
    ballot = Ballot(
        progress.turn, digest, work.may_compute(), work.may_leave(), votes, reasons, work.connects()
    )
    agreed, agreement_s = await _timed_agree(group, ballot)
    try:
        verdict = read_verdict(ballot, agreed)
    except RostersDiverged as error:
        raise RostersDiverged(f"{error}: {await _who_holds_what(group, ballot)}") from error
    work.on_agreement(verdict.connects)
    if group.size > 1:
        _report_wishes(work, votes, verdict, now_ms)
    await _gather_causes(work, group, verdict, now_ms)
    moves = work.roster.settle(verdict.votes, now_ms, verdict.reasons)
    for room, effect in moves:
        log.debug("moved", turn=progress.turn, room=room.id, effect=effect.value)
        work.perform(room, effect)
    more = verdict.compute and work.compute()
    await _gather(work, group)
    work.record(agreement_s)
    progress.ended(free=ballot.may_compute)
    if verdict.leave:
        return Lap.LAST
    if not news and any(effect is Effect.QUEUE for _, effect in moves):
        return Lap.QUEUED
    # What follows a grant comes from outside. Where there are other ranks, it leaves in the next turn only.
    if news or more or any(effect is not ReceiverEffect.GRANT or group.size > 1 for _, effect in moves):
        return Lap.BUSY
    return Lap.BEHIND if group.size > 1 and _ahead(ballot, verdict) else Lap.IDLE


def _ahead(mine: Ballot, verdict: Verdict) -> bool:
    """This rank wished to go on, and another one did not yet."""
    if mine.may_compute and not verdict.compute:
        return True
    return any(
        wish is Vote.ADVANCE and agreed is Vote.STAY
        for wish, agreed in zip(mine.votes, verdict.votes, strict=True)
    )


def _report_wishes(work: Work, votes: Sequence[Vote], verdict: Verdict, now_ms: int) -> None:
    """Where the ranks differ, timelines say which of them wished what."""
    if not verdict.reasons and tuple(votes) == verdict.votes:
        return
    for room in work.roster:
        wish = votes[room.index]
        if wish is Vote.ABORT or (wish is Vote.ADVANCE and verdict.votes[room.index] is not Vote.ADVANCE):
            work.record_vote(room, wish, now_ms)


async def _gather_causes(work: Work, group: RankGroup, verdict: Verdict, now_ms: int) -> None:
    """Where rooms end, the ranks that saw nothing hear the words of the first that did: the cause that a
    client reads is the root one (`first-cause-wins`)."""
    if group.size == 1 or not verdict.reasons:
        return
    mine = [
        (room.id, cause.text[:WORDS_MAX])
        for room in work.roster
        if (cause := room.ending(now_ms)) is not None and verdict.reasons.get(room.index) is cause.reason
    ]
    for told in await group.gather(_encoded(mine[:ROOMS_MAX])):
        for room, text in json.loads(told):
            reason = verdict.reasons[work.roster.get(RoomId(room)).index]
            work.roster.note(RoomId(room), Failed(Cause(reason, text)))


def _encoded(causes: list[tuple[RoomId, str]]) -> bytes:
    """As JSON, in which no character takes more than six bytes: so the bounds above are within the group's.
    Half a pair of surrogates, which no text in UTF-8 has, becomes an escape."""
    return json.dumps(causes, ensure_ascii=False).encode("utf-8", "backslashreplace")


async def _gather(work: Work, group: RankGroup) -> None:
    told = work.gather_payload()
    if told is not None:
        work.on_gathered(await group.gather(told))


async def _who_holds_what(group: RankGroup, mine: Ballot) -> str:
    """All ranks have read the same numbers, so that all of them come here. They end next: whatever breaks
    the group by then is not why."""
    ranks: dict[str, list[str]] = {}
    try:
        each = await group.gather(f"turn {mine.turn}, digest {mine.digest:#x}".encode())
    except GroupBroken as error:
        return f"which rank holds which is not known ({error})"
    with suppress(GroupBroken):
        await group.gather(b"")  # no rank leaves before all have heard
    for rank, told in enumerate(each):
        ranks.setdefault(told.decode(), []).append(str(rank))
    return "; ".join(f"rank {', '.join(each)}: {told}" for told, each in ranks.items())


async def _timed_agree(group: RankGroup, ballot: Ballot) -> tuple[Sequence[int], float]:
    loop = asyncio.get_running_loop()
    started = loop.time()
    agreed = await group.agree(ballot.encode())
    return agreed, loop.time() - started
