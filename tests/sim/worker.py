"""One incarnation of a worker: the processes of its ranks, and how they live and die together."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from baton.decode.decode_service import DecodeService
from baton.decode.decode_work import DecodeWork
from baton.decode.prefill_peers import Peers
from baton.ids import Incarnation, Opener
from baton.pages.record import SCHEMA_HASH
from baton.parallel.rank_group import GroupBroken
from baton.prefill.prefill_service import HandoverService, PrefillService
from baton.prefill.prefill_work import PrefillWork
from baton.rooms.errors import Cause, Reason, RostersDiverged
from baton.rooms.phases import Side
from baton.wire.baton.v1 import group_pb2, inference_pb2_grpc, workers_pb2, workers_pb2_grpc
from baton.wire.bootstrap_addresses import BootstrapAddresses
from baton.wire.channel import Channels
from baton.wire.conversions import side_to_wire
from baton.wire.errors import Draining
from baton.wire.layout_messages import layout_to_wire
from baton.wire.liveness import PresenceService
from baton.wire.receiver_secret import digest_of
from baton.wire.registration import routers_to_wire
from baton.wire.service_role import ServiceRole
from baton.wire.worker_credential import incarnation_of
from baton.worker.lifecycle.bootstrap_leases import BootstrapLeases
from baton.worker.lifecycle.leader_host import LAST_REPLIES_S, LAST_WORD_S, drain
from baton.worker.lifecycle.lease_keeper import LeaseKeeper
from baton.worker.reporter import Reporter
from baton.worker.turn_loop import TurnProgress, run_turns
from tests.sim.calls import Channel, SimulatedServer
from tests.sim.loop import Life, SimulatedProcess
from tests.sim.rank import LOOK_S, Outside, Rank, WorkerShape, World, make_rank
from tests.sim.slowness import BusyWork, CoreClock, QueuedArrivals, SlowGroup
from tests.support.loopback import Loopback
from tests.wire.receivers import decode_peer

DRAIN_MS: Final = 20_000
GRACE_S: Final = 1.5
"""Seconds that the platform leaves the other ranks after one has ended, so that they report the cause."""
KILL_S: Final = 0.05
LEFT: Final = "left"
"""Reason of the end of a worker that was not lost."""


class FixedAddresses(BootstrapAddresses):
    """Addresses of the simulation's bootstraps, which are names of its hosts, and are not looked up."""

    def __init__(self, addresses: Sequence[str]) -> None:
        super().__init__(addresses)
        self._names.clear()


class SimulatedWorker:
    """`on_end` is called once, with why, when all its processes are gone."""

    def __init__(
        self,
        world: World,
        side: Side,
        shape: WorkerShape,
        name: str,
        pid: int,
        on_end: Callable[["SimulatedWorker", str], None],
    ) -> None:
        self._world = world
        self.side = side
        self.shape = shape
        self.name = name
        self.pid = pid
        self._on_end = on_end
        self.other_sides: list[SimulatedWorker] = []
        """Workers of the other side in its process."""
        self.over = False
        self.born_s = world.loop.time()
        self._wounded = ""
        """Fault that was done to the worker, by which it may end."""
        drawn = world.incarnation()
        self._credential = drawn.to_bytes(8, "big") * 2
        self.incarnation = incarnation_of(self._credential)
        world.workers[self.incarnation] = self
        self._address = f"{name}:9000"
        rng = random.Random(f"{world.shape.writes.seed}/{drawn}")
        self._meeting = Loopback(shape.topology.ranks)
        late = min(world.shape.troubles.slow_ranks, self._meeting.size)
        slow = set(rng.sample(range(self._meeting.size), late))
        self.ranks: list[Rank] = []
        self.channels = Channels(lambda address, _: Channel(world.network, address))
        outside = Outside(self.incarnation, name, self.channels, self._credential)
        for rank, group in enumerate(self._meeting.groups()):
            self.ranks.append(
                make_rank(
                    world,
                    side,
                    self.incarnation,
                    SimulatedProcess(world.loop, f"{name}.{rank}" if self._meeting.size > 1 else name, name),
                    SlowGroup(group, rng, 0.01) if rank in slow else group,
                    None if rank else outside,
                    shape,
                    rng,
                )
            )
        self.leader = self.ranks[0]
        self._progress = TurnProgress(self.leader.clock)
        self._stop = asyncio.Event()
        self._server = SimulatedServer(world.network, self.leader.process, self._address)

    @property
    def lives(self) -> bool:
        """Return whether the leader runs and nothing was done to the worker that it may die of."""
        return not (self.over or self._wounded) and self.leader.process.life is Life.RUNNING

    @property
    def stands_still(self) -> bool:
        """Return whether some rank of the worker is paused."""
        return any(rank.process.life is Life.PAUSED for rank in self.ranks)

    @property
    def work(self) -> Any:
        """Return the leader's work."""
        return self.leader.work

    @property
    def peers(self) -> Peers | None:
        return self.work.peers if isinstance(self.work, DecodeWork) else None

    @property
    def reporter(self) -> Reporter:
        reporter: Reporter = self.work.ports.reporter
        return reporter

    # ---- what the platform does

    def start(self) -> None:
        for rank in self.ranks[1:]:
            follower = rank.process.spawn(self._turns(rank), "turns")
            follower.add_done_callback(partial(self._rank_ended, rank))
        main = self.leader.process.spawn(self._serve(), "main")
        main.add_done_callback(partial(self._rank_ended, self.leader))

    def ask_to_stop(self) -> None:
        """Ask the worker to stop, as SIGTERM does."""
        self.leader.process.soon(self._stop.set)

    def pause(self, ranks: Sequence[int]) -> None:
        """SIGSTOP. A group waits for a rank of it so long, and no longer."""
        for each in ranks:
            self.ranks[each].process.pause()
            self._world.fabric.stall(self.ranks[each].endpoints[-1])
        if 0 in ranks:
            self._world.network.paused(self.leader.process)
        if len(ranks) < len(self.ranks):
            self._world.loop.call_later(self._world.shape.troubles.group_s, self._lose_paused, ranks[0])

    def resume(self) -> None:
        for rank in self.ranks:
            if rank.process.life is Life.PAUSED:
                self._world.fabric.resume(rank.endpoints[-1])
                rank.process.resume()

    def crash(self, rank: int | None = None) -> None:
        """Kill all of the worker's processes as SIGKILL does, or one, which ends the others."""
        if self.over:
            return
        self._wounded = "crashed"
        if rank is None or len(self.ranks) == 1:
            self._die("crashed")
            return
        self._kill(self.ranks[rank])
        self._meeting.lose(rank, "died")
        self._end_all(self.ranks[rank], "one of its ranks crashed")

    # ---- its life

    async def _serve(self) -> None:
        """Serve like `WorkerHost.serve`."""
        self._add_services()
        leader, loop = self.leader, asyncio.get_running_loop()
        lease = BootstrapLeases(FixedAddresses(self._world.bootstraps), self._make_keeper, self._use_routers)
        self.reporter.load = self.work.load
        self.work.renew_leases_by(lease.renew_now)
        self._server.open()
        turns = loop.create_task(self._turns(leader))
        turns.add_done_callback(self._left)
        helpers = [loop.create_task(lease.run()), loop.create_task(self.reporter.run())]
        stopping = loop.create_task(self._stop.wait())
        try:
            await asyncio.wait({turns, stopping, *helpers}, return_when=asyncio.FIRST_COMPLETED)
            for task in (turns, *helpers):
                if task.done():
                    task.result()
            await drain(lease, turns, leader.mailbox, self.reporter, DRAIN_MS)
        except (GroupBroken, RostersDiverged) as error:
            for helper in helpers:
                helper.cancel()
            await self._break_off(lease, error)
            raise

    def _make_keeper(self, address: str, on_opener: Callable[[Opener, Opener], None]) -> LeaseKeeper:
        return LeaseKeeper(
            self.channels.to(address, ServiceRole.BOOTSTRAP),
            self._registration(),
            self._departed,
            lambda _: None,
            self.work.holds,
            lambda: self._progress.turn,
            on_opener,
        )

    def _use_routers(self, routers: Mapping[Opener, str], gone: Sequence[Opener]) -> None:
        message = routers_to_wire(routers, gone, is_only_one=False)
        self.leader.mailbox.put(group_pb2.Command(bootstraps=message))

    async def _break_off(self, lease: BootstrapLeases, error: Exception) -> None:
        """Break off like `WorkerHost`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await lease.drain(broken=True)
        cause = Cause(Reason.GROUP_BROKEN, f"{self.side.value} worker {self.name}: {error}")
        self.work.break_off(cause)
        self.leader.mailbox.fail(Draining(cause.text))
        await self._server.stop(LAST_REPLIES_S)

    def _left(self, turns: "asyncio.Task[None]") -> None:
        """Check that a worker whose ranks all agreed to leave holds no room."""
        held = [
            f"{rank.process.name}: {len(rank.work.roster)}" for rank in self.ranks if len(rank.work.roster)
        ]
        if not turns.cancelled() and turns.exception() is None and held:
            text = f"{self.name} left while it held rooms: {', '.join(held)}"
            self._world.trace.violate(self._world.loop.time(), "drain-keeps-promises", text)

    def _turns(self, rank: Rank) -> Any:
        work: Any = rank.work
        turn_s, clock = self._world.shape.troubles.turn_s, CoreClock(rank.clock, rank.process)
        if turn_s:
            work = BusyWork(work, rank.process, turn_s)
        progress = self._progress if rank is self.leader else TurnProgress(rank.clock)
        return run_turns(work, rank.group, clock, progress, QueuedArrivals(rank.process), LOOK_S)

    def _departed(self, incarnations: Sequence[Incarnation]) -> None:
        for incarnation in incarnations:
            self.leader.mailbox.put(group_pb2.Command(departed=incarnation))

    def _add_services(self) -> None:
        work, server = self.work, self._server
        workers_pb2_grpc.add_PresenceServiceServicer_to_server(PresenceService(self.incarnation), server)
        if isinstance(work, PrefillWork):
            inference_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillService(work), server)
            inference_pb2_grpc.add_HandoverServiceServicer_to_server(HandoverService(work), server)
        else:
            inference_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeService(work), server)

    @property
    def exit_secret(self) -> bytes:
        """Return the secret by which the platform, its starter, reports its exit."""
        return b"of process %d" % self.pid

    def _registration(self) -> workers_pb2.RegisterRequest:
        topology, whole = self.shape.topology, self.shape.whole
        return workers_pb2.RegisterRequest(
            worker=decode_peer(self.name, self.incarnation, self._address),
            side=side_to_wire(self.side),
            topology=workers_pb2.Topology(
                tensor_parallel=topology.tensor, pipeline_parallel=topology.pipeline
            ),
            layout=layout_to_wire(whole),
            schema=SCHEMA_HASH,
            tokens_max=self.shape.pages[0] * whole.groups[0].page_tokens,
            rooms_max=self._world.shape.places,
            pid=self.pid,
            credential=self._credential,
            exit_digest=digest_of(self.exit_secret),
            kv_checksum=self._world.shape.checksum.value,
            computes=self._world.shape.both > 0 and self.side is Side.DECODE,
            other_side=self._other_side(),
        )

    def _other_side(self) -> workers_pb2.OtherSide | None:
        for other in self.other_sides:
            process = f"both-{other.name.split('-')[1]}"
            return workers_pb2.OtherSide(incarnation=other.incarnation, process=process, prefill_weight=50)
        return None

    # ---- its end

    def _rank_ended(self, rank: Rank, task: "asyncio.Task[None]") -> None:
        """End the other ranks, as the platform does after a process ended by itself."""
        if self.over or rank.process.dead:
            return
        error = None if task.cancelled() else task.exception()
        if error is None:
            if rank is self.leader:
                self._die(LEFT)
            return
        if not (isinstance(error, GroupBroken) and self._wounded):
            name = "divergence-detected" if isinstance(error, RostersDiverged) else "moves-listed"
            text = f"{rank.process.name} ended by itself: {type(error).__name__}: {error}"
            self._world.trace.violate(self._world.loop.time(), name, text)
        self._wounded = self._wounded or "broken"
        self._kill(rank)
        self._end_all(rank, type(error).__name__)

    def _end_all(self, ended: Rank, why: str) -> None:
        """End the worker some time after one rank has ended. The other ranks have a while to report why, and
        less if it was the leader."""
        self._world.loop.call_later(KILL_S if ended is self.leader else GRACE_S, self._die, why)

    def _lose_paused(self, rank: int) -> None:
        if not self.over and self.ranks[rank].process.life is Life.PAUSED:
            self._wounded = "a rank was paused for too long"
            self._meeting.lose(rank, f"did not answer in {self._world.shape.troubles.group_s:g} s")

    def _kill(self, rank: Rank) -> None:
        rank.process.kill()
        for endpoint in rank.endpoints:
            self._world.fabric.kill(endpoint)
        if rank is self.leader:
            self._world.network.died(rank.process)

    def _die(self, why: str) -> None:
        if self.over:
            return
        self.over = True
        for rank in self.ranks:
            self._kill(rank)
        self._on_end(self, why)
