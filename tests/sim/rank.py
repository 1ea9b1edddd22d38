"""One rank's process of a worker, wired of the product's own parts as `wiring.py` wires them."""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

from baton.decode.decode_room import DecodeRoom
from baton.decode.decode_work import DecodeWork
from baton.decode.draft_scheduler import DraftScheduler
from baton.decode.metrics import DecodeMetrics
from baton.decode.prefill_peers import FollowerPeers, LeaderPeers
from baton.handover.receiving_side import ReceivingSide
from baton.ids import NO_OPENER, Incarnation, Opener, RoomId
from baton.pages.layout import KvLayout
from baton.pages.rank_layout import rank_layout
from baton.parallel.rank_group import RankGroup
from baton.prefill.metrics import PrefillMetrics
from baton.prefill.prefill_work import PrefillWork
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Cause
from baton.rooms.phases import Effect, ReceiverEffect, Side
from baton.rooms.receiver import UNDECIDED
from baton.rooms.request import Request
from baton.rooms.timeline import Moment
from baton.rooms.worker_facts import CANARY_ROOMS
from baton.topology import Topology
from baton.transfer.exposure import Exposure
from baton.transfer.transfer_protocol import Transfer
from baton.wire.baton.v1 import group_pb2
from baton.wire.channel import Channels
from baton.wire.model_bounds import ModelBounds
from baton.wire.service_role import ServiceRole
from baton.worker.assembly import RankMemory, RankPorts
from baton.worker.mailbox import Mailbox
from baton.worker.reporter import Reporter
from baton.worker.step_thread import StepThread
from tests.layouts import changed
from tests.sim.clock import SkewedClock
from tests.sim.engine import (
    CONTEXT,
    PAGE_TOKENS,
    VOCABULARY,
    WHOLE,
    SimulatedEngine,
    SimulatedModel,
    SimulatedThread,
)
from tests.sim.fabric import Bank, WatchedFabric
from tests.sim.growth import WorkerGrowth
from tests.sim.loop import SimulatedProcess, VirtualLoop
from tests.sim.network import Network
from tests.sim.profile import Profile
from tests.sim.slowness import PatientMailbox
from tests.sim.states import SimulatedStates, states_of
from tests.sim.trace import Trace
from tests.wire.receivers import secret_of

if TYPE_CHECKING:
    from tests.sim.worker import SimulatedWorker

CONNECT_S: Final = 1.5
PREFILL_DEADLINES: Final = Deadlines(4_000, 5_000, 5_000, 5_000, 5_000)
DECODE_DEADLINES: Final = Deadlines(3_000, 6_000, 6_000, 3_600_000, 4_000)
LOOK_S: Final = 0.01
"""Seconds between polls of what wakes no task. Production polls more often. Each poll costs a turn."""


def bootstrap_name(number: int) -> str:
    return f"bootstrap-{number}" if number else "bootstrap"


@dataclass(slots=True)
class World:
    """The world of all processes."""

    loop: VirtualLoop
    network: Network
    fabric: WatchedFabric
    trace: Trace
    shape: Profile
    rng: random.Random
    """Random numbers of processes at start: incarnations, drifts."""
    step_failure_share: float = 0.0
    workers: "dict[Incarnation, SimulatedWorker]" = field(default_factory=dict)
    """Every worker that ever existed, by incarnation."""
    grown: dict[Incarnation, WorkerGrowth] = field(default_factory=dict)
    """Growth of each decode worker."""
    model: SimulatedModel = field(init=False)

    def __post_init__(self) -> None:
        self.model = SimulatedModel(self.whole)

    @property
    def bootstraps(self) -> list[str]:
        """Return the addresses of all bootstraps."""
        return [f"{bootstrap_name(number)}:8100" for number in range(self.shape.bootstraps)]

    @property
    def whole(self) -> KvLayout:
        """Layout of a whole worker, without the size of its pages."""
        whole = changed(WHOLE, heads=self.shape.kv_heads)
        return replace(whole, groups=(*whole.groups, states_of(CONTEXT))) if self.shape.states else whole

    def growth(self, worker: Incarnation, ranks: int, name: str) -> WorkerGrowth:
        """Return this decode worker's growth, the same object for all its ranks."""

        def violate(invariant: str, text: str, room: RoomId) -> None:
            self.trace.violate(self.loop.time(), invariant, f"{name}: {text}", room)

        return self.grown.setdefault(worker, WorkerGrowth(ranks, violate))

    def incarnation(self) -> Incarnation:
        return Incarnation(self.rng.getrandbits(63) | 1)


@dataclass(slots=True)
class Rank:
    process: SimulatedProcess
    clock: SkewedClock
    group: RankGroup
    mailbox: Mailbox
    bank: Bank
    engine: SimulatedEngine
    step_thread: StepThread
    registry: CollectorRegistry
    work: PrefillWork | DecodeWork
    endpoints: list[Incarnation]
    """Every transfer endpoint of the rank so far, the present one last."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Connections of the leader to others. Followers have none."""

    incarnation: Incarnation
    name: str
    channels: Channels
    credential: bytes

    def reporter(self, clock: SkewedClock) -> Reporter:
        return Reporter(
            lambda address: self.channels.to(address, ServiceRole.BOOTSTRAP),
            self.incarnation,
            self.name,
            clock,
            credential=self.credential,
        )

    def peers(self, ports: RankPorts) -> LeaderPeers:
        return LeaderPeers(ports, self.channels, secret_of(self.incarnation), CONNECT_S)


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """Shape of one worker."""

    topology: Topology
    whole: KvLayout
    pages: tuple[int, ...]
    """Pages of each rank, by KV group."""

    @classmethod
    def of(
        cls, topology: Topology, whole: KvLayout, page_tokens: int, pages: int, states: int = 0
    ) -> "WorkerShape":
        """`pages`: if they held PAGE_TOKENS each. `states`: pages for states, if the model has some."""
        first, *others = whole.groups
        groups = (replace(first, page_tokens=page_tokens), *others)
        counts = (pages * PAGE_TOKENS // page_tokens, *[states for _ in others])
        return cls(topology, replace(whole, groups=groups), counts)

    @property
    def layouts(self) -> list[KvLayout]:
        """Return the layouts of all ranks."""
        return [rank_layout(self.whole, self.topology, rank) for rank in range(self.topology.ranks)]


class SilentReporter(Reporter):
    """Reporter of a follower. Nothing that is checked depends on its reports."""

    def __init__(self) -> None:
        self.dropped = 0

    def use(
        self, routers: Mapping[Opener, str], gone: Collection[Opener] = (), *, is_only_one: bool = False
    ) -> None: ...

    def opened(self, room: RoomId, request: Request, opener: Opener = NO_OPENER) -> None: ...

    def adopted(self, room: RoomId, opener: Opener) -> None: ...

    def failed(self, room: RoomId, cause: Cause) -> None: ...

    def report(self, room: RoomId, name: Moment, detail: str = "") -> None: ...

    def report_of_rank(self, room: RoomId, name: Moment, detail: str = "") -> None: ...

    def retired(self, room: RoomId, detail: str = "") -> None: ...


class ChanceClaims:
    """Random claims of a leader to compute rooms. Clocks and rates, which decide in production, mean
    nothing here. A room is claimed when it comes, or after waiting some turns."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self._random = rng
        self._share = share
        self._turns: dict[RoomId, int] = {}
        """Turns until each waiting room is claimed, by room. A negative number means never."""

    def due(self, receiving: ReceivingSide[DecodeRoom]) -> list[RoomId]:
        if not self._share:
            return []
        waiting = [room for room in receiving.roster if room.phase in UNDECIDED and not room.local]
        self._turns = {room.id: self._left(room.id) for room in waiting}
        return [
            room.id for room in waiting if self._turns[room.id] == 0 and room.request.prompt_logprobs is None
        ]

    def _left(self, room: RoomId) -> int:
        if room not in self._turns:
            return self._random.choice((0, 0, 1, 4)) if self._random.random() < self._share else -1
        return self._turns[room] - 1


class WatchedDecode(DecodeWork):
    """Reads what has landed before anything else does, and has it looked at how its rooms grow."""

    landed: SimulatedEngine
    rank: int
    growth: WorkerGrowth
    claims: "ChanceClaims"

    def take_commands(self) -> bytes:
        for room in self.claims.due(self.receiving):
            told = group_pb2.ComputeHere(
                room=room, chunk_tokens=self.receiving.layout.block_tokens, why="by chance"
            )
            self.ports.mailbox.put(group_pb2.Command(compute_here=told))
        return super().take_commands()

    def compute(self) -> bool:
        revokes = self.receiving.revoking
        again = super().compute()
        if not revokes:
            self.growth.look(self.rank, self.receiving, computes=not self.scheduler.free)
        return again

    def perform(self, room: DecodeRoom, effect: Effect | ReceiverEffect) -> None:
        if effect is ReceiverEffect.ADMIT:
            self.landed.check_landed(room.request, room.tables(0))
        super().perform(room, effect)


def make_rank(
    world: World,
    side: Side,
    worker: Incarnation,
    process: SimulatedProcess,
    group: RankGroup,
    outside: Outside | None,
    worker_shape: WorkerShape,
    rng: random.Random,
) -> Rank:
    """`outside`: the leader's."""
    shape, layouts = world.shape, worker_shape.layouts
    layout = layouts[group.rank]
    clock = _clock(world, rng)
    mailbox = PatientMailbox(LOOK_S)
    reporter = SilentReporter() if outside is None else outside.reporter(clock)
    registry = CollectorRegistry()

    def foreign(text: str, invariant: str = "stale-never-served") -> None:
        world.trace.violate(world.loop.time(), invariant, f"{process.name}: {text}")

    def unreleased(text: str) -> None:
        world.trace.violate(world.loop.time(), "each-is-released", f"{process.name}: {text}")

    def fails() -> bool:
        if not world.step_failure_share or rng.random() >= world.step_failure_share:
            return False
        world.trace.fault(world.loop.time(), "step failed", process.name)
        return True

    states = SimulatedStates(layout.groups[1], worker_shape.pages[1]) if layout.states else None
    engine = SimulatedEngine(layout, worker_shape.pages[0], world.model, foreign, unreleased, states)
    step_thread = StepThread(
        engine, mailbox.wake, SimulatedThread(engine, world.loop, rng, fails, shape.slow)
    )
    places = shape.places + CANARY_ROOMS
    caches = [engine.memory] if states is None else [engine.memory, states.memory]
    memory = RankMemory.of(
        caches, worker_shape.pages, layout, places, keeps_prefixes=shape.reuse, state_gap_tokens=PAGE_TOKENS
    )
    bank = Bank(
        process.name,
        process.host,
        worker,
        group.rank,
        [(group.page_bytes, cache) for group, cache in zip(layout.groups, caches, strict=True)],
        memory.slots,
        memory.holdings,
    )
    known: list[Incarnation] = []
    leads_prefill = side is Side.PREFILL and outside is not None
    work: PrefillWork | DecodeWork

    def connected(incarnation: Incarnation) -> Transfer:
        known.append(incarnation)
        return world.fabric.endpoint(incarnation, bank)

    def own_id() -> Incarnation:
        return worker

    ports = RankPorts(
        incarnation=worker,
        layouts=layouts,
        rank=group.rank,
        bounds=ModelBounds(VOCABULARY, CONTEXT),
        checksum=shape.checksum,
        step_thread=step_thread,
        memory=memory,
        exposure=Exposure(
            connected, lambda: worker if leads_prefill else world.incarnation(), memory.regions
        ),
        mailbox=mailbox,
        reporter=reporter,
        clock=clock,
    )
    if side is Side.PREFILL:
        work = PrefillWork(
            ports,
            replace(PREFILL_DEADLINES, orphan_ms=shape.orphan_ms),
            metrics=PrefillMetrics(registry),
            chunk_tokens=shape.chunk_tokens,
            window_bytes=shape.window_bytes,
        )
    else:
        work = WatchedDecode(
            ports,
            replace(DECODE_DEADLINES, orphan_ms=shape.orphan_ms),
            peers=FollowerPeers() if outside is None else outside.peers(ports),
            metrics=DecodeMetrics(registry, shape.max_running),
            max_running=shape.max_running,
            drafting=DraftScheduler(shape.drafts_by),
            near_s=0.0,  # time stands still for who looks without a pause
        )
        work.landed, work.rank = engine, group.rank
        work.claims = ChanceClaims(random.Random(f"{shape.writes.seed}/{worker}/local"), shape.local)
        work.growth = world.growth(worker, group.size, process.name)
    return Rank(process, clock, group, mailbox, bank, engine, step_thread, registry, work, known)


def _clock(world: World, rng: random.Random) -> SkewedClock:
    if not world.shape.troubles.skew:
        return SkewedClock(world.loop)
    return SkewedClock(
        world.loop,
        start_ms=rng.randrange(10**9),
        drift=rng.uniform(-0.02, 0.02),
        skew_ms=rng.randrange(-(10**7), 10**7),
    )
