"""Checks of what no faulty process can see itself."""

from collections import Counter
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

from baton.fleet.retry import RetryBounds
from baton.fleet.room_entry import RoomEntry
from baton.handover.page_growth import AHEAD
from baton.ids import Incarnation, RoomId
from baton.pages.pool import PageState
from baton.prefill.prefill_work import PrefillWork
from baton.rooms.errors import Reason
from baton.rooms.phases import Phase
from baton.rooms.timeline import BOOTSTRAP, Moment
from baton.transfer.transfer_protocol import Transfer
from tests.decode.links import asking, closing, needed
from tests.sim.rank import World
from tests.sim.worker import SimulatedWorker

if TYPE_CHECKING:
    from tests.sim.platform import Platform

NEWS_S: Final = 2.0
"""Time in which every other worker learns of a worker's end that the bootstrap knows of, seconds."""
DEATHS: Final = frozenset({"crash", "rank crash", "rank pause"})
STALL: Final = "rank stall"
SILENCE: Final = frozenset({"pause", "rank pause", "cut", "bootstrap pause", STALL})
WRITES: Final = frozenset({"write failed", "write held"})
FAILURES: Final = frozenset({"step failed", "rank abort"})
FLIPS: Final = frozenset({"bit flipped"})
LOSSES: Final = frozenset({"request lost", "answer lost", "reset", "slow message"})
TROUBLE: Final = DEATHS | SILENCE | LOSSES | {"bootstrap crash"}

HUSHED: Final = SILENCE - {STALL} | LOSSES | {"bootstrap crash"}
"""Troubles that keep a worker's messages from the bootstrap. Delays are not among them."""

QUIET: Final = DEATHS - {"rank pause"} | WRITES | FLIPS | {"step failed", "rank abort", "cancel", "storm"}
"""Troubles that keep no news from anyone."""

EXPLAINS: Final[dict[str, frozenset[str]]] = {
    Reason.CANCELLED.value: frozenset({"cancel"}),
    Reason.DEADLINE.value: TROUBLE | {"write held"},
    Reason.PREFILL_LOST.value: TROUBLE,
    Reason.DECODE_LOST.value: TROUBLE,
    Reason.BOOTSTRAP_LOST.value: TROUBLE,
    Reason.CONNECT_FAILED.value: TROUBLE | WRITES,
    Reason.TRANSFER_FAILED.value: TROUBLE | WRITES,
    Reason.RECEIVER_CLOSED.value: TROUBLE | WRITES | FAILURES,
    Reason.MEMORY_REVOKED.value: SILENCE | WRITES | LOSSES | DEATHS,
    Reason.ENGINE_FAILED.value: FAILURES,
    Reason.PAGES_CORRUPT.value: FLIPS,
    Reason.GROUP_BROKEN.value: frozenset({"rank crash", "rank pause"}),
    Reason.DRAINING.value: SILENCE | LOSSES | {"rank crash", "bootstrap crash"},
    Reason.REFUSED.value: TROUBLE | WRITES,
    "no worker": TROUBLE | {"drain"},
}
"""Kinds of trouble that can cause a client's error, by the error. No entry: none ever can."""


PATIENCE: Final = frozenset(
    {
        Reason.DEADLINE.value,
        Reason.PREFILL_LOST.value,
        Reason.DECODE_LOST.value,
        Reason.BOOTSTRAP_LOST.value,
        Reason.CONNECT_FAILED.value,
        Reason.RECEIVER_CLOSED.value,
        Reason.REFUSED.value,
        "no worker",
    }
)
"""Reasons that come from giving up the wait for an answer that takes long."""
ROOMS_MAX: Final = RetryBounds().rooms_max
"""Most rooms of a request in a row that bring no token."""
PAUSES_MS: Final = (10, 40, 160, 500, 500)
"""Shortest pauses before the next room, by the number of failed rooms before it, ms."""
CLOCK_MS: Final = 2
SENT_PER_ROOM: Final = 3
"""Most messages per room, on average. Each of two workers is asked for it and told once that it is over. One
message may tell several ends."""
SENT_PER_BREAK: Final = 4
"""Further messages to a worker for each stream that broke, since ends of rooms are sent again."""
SENT_BESIDE: Final = 40
BREAKS: Final = TROUBLE - {"slow message"}

THERE: Final = ("free", "cached", "left")
"""Names of states of pages that are not in use."""

NAMED: Final = {
    Reason.RECORD_CORRUPT.value: "slot-owner",
    Reason.PAGES_CORRUPT.value: "stale-never-served",
    Reason.DEADLINE.value: "room-ends",
    Reason.RETRACTED.value: "retracted-is-no-failure",
    Reason.WORKER_FULL.value: "full-is-no-failure",
}
"""Reasons that no fault of the simulation explains, and the invariant that each shows broken."""
NO_FAILURES: Final = (Reason.RETRACTED, Reason.WORKER_FULL)


def explained(reason: str, faults: "Counter[str]") -> bool:
    return any(faults[kind] for kind in EXPLAINS.get(reason, ()))


def broken_by(reason: str, faults: "Counter[str]") -> str:
    """The invariant that does not hold when rooms fail for this reason, and nothing explains it."""
    if faults["slow handlers"] and reason in PATIENCE:
        return "live-is-not-lost"
    if reason == Reason.DEADLINE.value and not faults:
        return "waiting-has-no-deadline"
    return NAMED.get(reason, "drain-keeps-promises" if faults["drain"] else "first-cause-wins")


def may_be_lost(world: World, incarnation: Incarnation) -> bool:
    """Return whether a worker may be lost: it does not live, or a fault keeps its messages from the bootstrap
    (`live-is-not-lost`)."""
    return not world.workers[incarnation].lives or bool(HUSHED & world.trace.faults.keys())


def deaf(platform: "Platform", now_s: float, known_s: dict[int, float]) -> list[tuple[str, int]]:
    """Rooms that failed, and wait on although their peer is known to be gone, while nothing keeps the news
    from reaching their worker (`terminal-reaches-peer`). `known_s`: since when, kept from call to call."""
    for bootstrap in platform.present:
        for incarnation in bootstrap.registry.departed():
            known_s.setdefault(incarnation, now_s)
    return [
        (f"{worker.name}: room {room.id} waits for a proof, and its peer was known to be gone", room.id)
        for worker in platform.running()
        for room in worker.work.roster
        if room.phase is Phase.FAILED and now_s - max(known_s.get(room.peer, now_s), worker.born_s) > NEWS_S
    ]


def unexplained(platform: "Platform", faults: "Counter[str]") -> list[tuple[str, str, int]]:
    """Rooms that failed for a reason that nothing explains, also those that were followed by another: the
    invariant, a text, the room."""
    found: list[tuple[str, str, int]] = []
    for bootstrap in platform.bootstraps:
        own = Counter(faults)
        if len(platform.present) > 1 and bootstrap.number not in platform.crashed:
            del own["bootstrap crash"]  # of another one, which takes none of these rooms along
        for entry in bootstrap.registry.rooms():
            cause = entry.cause
            if cause is not None and cause.reason is Reason.LOCAL:
                text = f"room {entry.id} ended for {cause.reason.value}: {cause.text}"
                found.append(("mine-or-granted", text, entry.id))
            if _is_handed_over_at_home(entry):
                text = f"room {entry.id} is handed over within one process"
                found.append(("kept-at-home", text, entry.id))
            if cause is None or not entry.has_failed or explained(cause.reason.value, own):
                continue
            text = f"room {entry.id} failed, and nothing that happened explains it: {cause.reason.value}"
            found.append((broken_by(cause.reason.value, own), f"{text}: {cause.text}", entry.id))
    return found


def _is_handed_over_at_home(entry: RoomEntry) -> bool:
    """Return whether a room is handed over between two sides of one process. Only canaries and the run's last
    rooms are, since no request scores its prompt here."""
    other = None if entry.prefill is None else entry.prefill.other_side
    return other is not None and other.incarnation == entry.decode.incarnation and not entry.canary


def _passed_on(entry: RoomEntry) -> bool:
    """Return whether the room brought its request a token. Rooms that bring none are counted in a row."""
    return any(event.name == "first token passed on" for event in entry.events)


def _is_no_failure(entry: RoomEntry) -> bool:
    """Return whether a room was retracted, or refused by a full worker, so that it costs no attempt."""
    return entry.cause is not None and entry.cause.reason in NO_FAILURES


def _is_told_as_failed(entry: RoomEntry) -> bool:
    told = {event.name for event in entry.events if event.source == BOOTSTRAP}
    return entry.has_failed or not told.isdisjoint({Moment.FAILED, Moment.RETRIED})


def mistaken(platform: "Platform") -> list[tuple[str, str, int]]:
    """Retractions and refusals of full workers that are taken for failures: the invariant, a text, and the
    room if it is one."""
    found: list[tuple[str, str, int]] = []
    for bootstrap in platform.bootstraps:
        for reason in NO_FAILURES:
            law, word = NAMED[reason.value], reason.value
            found += [
                (law, f"room {entry.id} ended as {word}, and is filed or told as failed", entry.id)
                for entry in bootstrap.registry.rooms()
                if entry.cause is not None and entry.cause.reason is reason and _is_told_as_failed(entry)
            ]
            for metric in ("baton_rooms_failed_total", "baton_request_retries_total"):
                if counted := bootstrap.metrics.get_sample_value(metric, {"reason": word}):
                    found.append((law, f"{counted:g} rooms that ended as {word} are counted in {metric}", 0))
    return found


def amplified(platform: "Platform", faults: "Counter[str]", sent: int) -> list[tuple[str, int]]:
    """Return a violation of `failure-adds-no-load` as a text, and its room if there is one. `sent`:
    requests of the bootstrap to workers."""
    found: list[tuple[str, int]] = []
    opened = 0
    for bootstrap in platform.bootstraps:
        opened += bootstrap.opened()
        entries = {entry.id: entry for entry in bootstrap.registry.rooms()}
        followed = Counter(entry.retry_of for entry in entries.values() if entry.retry_of is not None)
        for room, count in followed.items():
            if count > entries[room].choices:  # each may have got another far
                found.append((f"room {room} was followed by {count} rooms", room))
        for entry in entries.values():
            rooms, failed = 0, entry
            while (last := entries.get(failed.retry_of or RoomId(0))) is not None and not _passed_on(last):
                rooms, failed = rooms + (not _is_no_failure(last)), last
            before = None if entry.retry_of is None else entries.get(entry.retry_of)
            if before is None or _is_no_failure(before):
                continue
            paused_ms = entry.opened_ms - before.closing_ms
            if rooms >= ROOMS_MAX:
                found.append((f"room {entry.id} is the {rooms + 1}. in a row of its request", entry.id))
            elif paused_ms + CLOCK_MS < PAUSES_MS[max(rooms - 1, 0)]:
                found.append((f"room {entry.id} followed another after {paused_ms} ms", entry.id))
    breaks = sum(faults[kind] for kind in BREAKS)
    if sent > SENT_PER_ROOM * opened + SENT_PER_BREAK * breaks + SENT_BESIDE:
        found.append((f"the bootstrap sent {sent} requests for {opened} rooms", 0))
    return found


def dirty(platform: "Platform") -> list[str]:
    """Free slots that are not blank (`slot-zero`)."""
    found = []
    for worker in platform.running():
        for rank in worker.ranks:
            pool = rank.bank.holdings.slots
            if pool.free == len(pool) and any(rank.bank.slots.view):
                found.append(f"{rank.process.name}: a free slot is not blank")
    return found


def unrest(platform: "Platform") -> list[str]:
    """Return what is not as it was before the first room (`zero-at-idle`)."""
    found = []
    for bootstrap in platform.living():
        rooms, name = bootstrap.rooms, bootstrap.name
        found += _held(name, "open rooms", bootstrap.registry.open_count())
        found += _held(name, "queued requests", rooms.admission.queued())
        found += _held(name, "watchers", len(rooms.timelines.watchers))
        found += _held(name, "followed rooms", len(rooms.followers))
        found += _held(name, "rooms that workers may hold", rooms.streams.over())
        found += _held(name, "rooms on links", rooms.streams.rooms())
        for known in bootstrap.registry.workers():
            found += _held(name, f"rooms of {known.facts.name}", len(known.rooms))
            found += _held(name, f"tokens of {known.facts.name}", known.tokens)
        found += _gauges(
            name, bootstrap.metrics, ("baton_workers", "baton_workers_weight", "baton_alone_workers")
        )
    for worker in platform.running():
        found += _worker(worker)
    return found


def _worker(worker: SimulatedWorker) -> list[str]:
    found = []
    for rank in worker.ranks:
        name, work, holdings = rank.process.name, rank.work, rank.bank.holdings
        found += _held(name, "rooms in the roster", len(work.roster))
        found += _held(name, "calls that open a room", len(work.callers))
        found += _held(name, "rows of a step", len(work.scheduler))
        found += _held(name, "holdings", len(holdings))
        found += _held(name, "pages", sum(holdings.sizes) - sum(holdings.available))
        found += _held(name, "prefixes in use", len(holdings.prefixes) - holdings.prefixes.evictable)
        tree, cached = holdings.prefixes, holdings.census()[PageState.CACHED]
        known = sum(tree.counts(len(tree))) + sum(tree.state_counts(tree.evictable_states))
        found += _held(name, "cached pages that no tokens lead to", cached - known)
        if isinstance(work, PrefillWork):
            found += _held(name, "grants that wait for their rooms", len(work.early))
        else:
            capacity = work.capacity()
            found += _held(name, "pages left for those that grow", sum(capacity.margin))
            found += _held(name, "sequences granted", AHEAD * work.max_running - capacity.rows)
        found += _held(name, "slots", len(holdings.slots) - holdings.slots.free)
        found += _held(name, "sequences that are not released", len(rank.engine.live))
        found += _held(name, "steps", int(not rank.step_thread.free))
        found += _held(
            name, "questions in the mailbox", len(rank.mailbox.unanswered) + len(rank.mailbox.waiting)
        )
        found += _held(name, "puts", _puts(work.ports.exposure.transfer))
        found += _gauges(name, rank.registry, ())
    if worker.peers is not None:
        found += _held(worker.name, "closes", closing(worker.peers))
        found += _held(worker.name, "senders that have not answered", asking(worker.peers))
        unneeded = worker.channels.incarnations() - needed(worker.peers)
        found += _held(worker.name, "channels that nobody needs", len(unneeded))
    found += _held(worker.name, "reports", len(worker.reporter.pending))
    return found


def _puts(transfer: Transfer) -> int:
    ledger = transfer.ledger  # type: ignore[attr-defined]
    return len(ledger.under_way())


def _held(who: str, what: str, count: int) -> list[str]:
    return [f"{who}: {count} {what}"] if count else []


def _gauges(who: str, registry: CollectorRegistry, but: tuple[str, ...]) -> list[str]:
    samples = [
        sample
        for family in registry.collect()
        if family.type == "gauge" and family.name not in but
        for sample in family.samples
    ]
    return [
        f"{who}: gauge {sample.name}{sample.labels or ''} is {sample.value:g}"
        for sample in samples
        if sample.value and sample.labels.get("state") not in THERE
    ]
