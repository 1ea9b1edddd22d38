"""Faults, and when they strike."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from baton.rooms.errors import Cause, Reason, UnknownWorker
from baton.rooms.evidence import Failed
from baton.rooms.phases import Phase, Side
from baton.testing.transfer_faults import NO_FAULTS
from tests.sim.checks import STALL
from tests.sim.clients import Clients
from tests.sim.network import CALM
from tests.sim.platform import Platform
from tests.sim.rank import World, bootstrap_name
from tests.sim.worker import SimulatedWorker

STALL_S = 6.0
"""Time in which the bootstrap learns of a turn that does not end, seconds: the registry's shortest lease and
one message."""
SHORT_OR_LONG_S = (0.1, 0.4, 1.5, 4.0, 18.0)


class Faults:
    """The faults of a run, one task each: it waits for its time, makes the fault, and undoes it later."""

    def __init__(self, world: World, platform: Platform, clients: Clients, seed: str) -> None:
        self._world = world
        self._platform = platform
        self._clients = clients
        self._random = random.Random(f"{seed}/faults")
        self._tasks: list[asyncio.Task[None]] = []
        self._cuts: list[tuple[str, str, bool]] = []

    def start(self) -> None:
        troubles = self._world.shape.troubles
        self._world.network.weather = replace(self._world.shape.weather, late_renewals=troubles.late_renewals)
        self._world.network.handler_rounds = troubles.handler_rounds
        if troubles.handler_rounds:
            self._note("slow handlers", f"{troubles.handler_rounds} rounds")
        self._world.step_failure_share = troubles.step_failure_share
        self._world.fabric.follow(self._world.shape.writes)
        self._world.fabric.late_share = troubles.late_share
        self._world.fabric.late_steps = troubles.late_steps
        self._world.fabric.flip_share = troubles.flip_share
        kinds: tuple[tuple[int, Callable[[], Awaitable[None]]], ...] = (
            (troubles.crashes, self._crash),
            (troubles.rank_crashes, self._crash_rank),
            (troubles.rank_aborts, self._abort_rank),
            (troubles.pauses, self._pause),
            (troubles.rank_pauses, self._pause_rank),
            (troubles.rank_stalls, self._stall_rank),
            (troubles.busy_bootstraps, self._busy_bootstrap),
            (troubles.silences, self._silence),
            (troubles.bootstrap_crashes, self._crash_bootstrap),
            (troubles.bootstrap_pauses, self._pause_bootstrap),
            (troubles.cuts, self._cut),
            (troubles.resets, self._reset),
            (troubles.drains, self._drain),
            (troubles.storms, self._storm),
            (troubles.weights, self._weigh),
        )
        for count, kind in kinds:
            for _ in range(count):
                at_s = self._random.uniform(0.0, self._world.shape.arrivals_s * 1.1)
                self._tasks.append(self._world.loop.create_task(self._at(at_s, kind)))

    def heal(self) -> None:
        """Stop all faults and repair what they broke."""
        for task in self._tasks:
            task.cancel()
        for one, other, both in self._cuts:
            self._world.network.mend(one, other, both=both)
        self._cuts.clear()
        self._world.network.weather = CALM
        self._world.network.handler_rounds = 0
        self._world.step_failure_share = 0.0
        self._world.fabric.follow(NO_FAULTS)
        self._world.fabric.late_share = 0.0
        self._world.fabric.flip_share = 0.0
        self._platform.bootstrap.process.resume()
        self._platform.bootstrap.server.late_s = 0.0
        for worker in self._platform.running():
            worker.resume()

    async def _at(self, after_s: float, kind: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(after_s)
        await kind()

    def _note(self, kind: str, detail: str) -> None:
        self._world.trace.fault(self._world.loop.time(), kind, detail)

    def _any_worker(self) -> SimulatedWorker | None:
        running = self._platform.running()
        return self._random.choice(running) if running else None

    # ---- kinds

    async def _crash(self) -> None:
        worker = self._any_worker()
        if worker is not None:
            self._note("crash", worker.name)
            worker.crash()

    async def _crash_rank(self) -> None:
        worker = self._any_worker()
        if worker is not None:
            rank = self._random.randrange(len(worker.ranks))
            self._note("rank crash", worker.ranks[rank].process.name)
            worker.crash(rank)

    async def _abort_rank(self) -> None:
        """Abort a room by evidence of one rank alone, a pipeline's first stage or its last. It ends on all
        ranks."""
        worker = self._any_worker()
        rooms = [] if worker is None else [room for room in worker.work.roster if room.cause is None]
        if worker is not None and rooms:
            rank, room = self._random.choice((worker.ranks[0], worker.ranks[-1])), self._random.choice(rooms)
            self._note("rank abort", f"room {room.id} on {rank.process.name}")
            cause = Cause(Reason.ENGINE_FAILED, f"{worker.side.value}: a fault of the simulation")
            rank.work.roster.note(room.id, Failed(cause))

    async def _pause(self) -> None:
        worker = self._any_worker()
        if worker is not None:
            for_s = self._random.choice(SHORT_OR_LONG_S)
            self._note("pause", f"{worker.name} for {for_s:g} s")
            worker.pause(range(len(worker.ranks)))
            await asyncio.sleep(for_s)
            worker.resume()

    async def _silence(self) -> None:
        """Stop a sender while a receiver waits for its rooms. Later it would not matter."""
        senders = [each for each in self._platform.running() if each.side is Side.PREFILL]
        busy = [each for each in senders if each.work.roster.census()[Phase.TRANSFERRING]]
        if not busy:
            return
        sender, for_s = self._random.choice(busy), self._random.uniform(6.0, 25.0)
        if self._random.random() < 0.5:
            self._note("pause", f"{sender.name} for {for_s:.1f} s")
            sender.pause(range(len(sender.ranks)))
            await asyncio.sleep(for_s)
            sender.resume()
        else:
            receivers = [name for name, each in self._platform.workers.items() if each.side is Side.DECODE]
            await self._cut_off(sender.name, self._random.choice(receivers), both=True, for_s=for_s)

    async def _pause_rank(self) -> None:
        worker = self._any_worker()
        if worker is not None:
            rank = self._random.randrange(len(worker.ranks))
            for_s = self._random.choice(SHORT_OR_LONG_S)
            self._note("rank pause", f"{worker.ranks[rank].process.name} for {for_s:g} s")
            worker.pause([rank])
            await asyncio.sleep(for_s)
            worker.resume()

    async def _stall_rank(self) -> None:
        """Stop a rank for a while, and check that a worker whose turn does not end loses its lease
        (`honest-health`)."""
        running = [each for each in self._platform.running() if each.lives]
        groups = [each for each in running if len(each.ranks) > 1 and not each.stands_still]
        if not groups:
            return
        worker = self._random.choice(groups)
        rank, for_s = self._random.randrange(1, len(worker.ranks)), self._random.choice((1.0, 2.0, 8.0, 16.0))
        self._note(STALL, f"{worker.ranks[rank].process.name} for {for_s:g} s")
        worker.pause([rank])
        await asyncio.sleep(min(for_s, STALL_S))
        if for_s > STALL_S:
            if worker.lives and self._platform.bootstrap.registry.holds_lease(worker.incarnation):
                text = f"{worker.name} holds its lease, and its turn has not ended for {STALL_S:g} s"
                self._world.trace.violate(self._world.loop.time(), "honest-health", text)
            await asyncio.sleep(for_s - STALL_S)
        worker.resume()

    async def _busy_bootstrap(self) -> None:
        late_s, for_s = self._random.choice((0.3, 1.5, 5.0)), self._random.choice((2.0, 6.0))
        self._note("busy bootstrap", f"{late_s:g} s late for {for_s:g} s")
        server = self._platform.bootstrap.server
        server.late_s = late_s
        await asyncio.sleep(for_s)
        server.late_s = 0.0

    async def _crash_bootstrap(self) -> None:
        if living := self._platform.living():
            down_s = self._random.uniform(0.05, 2.0)
            which = self._random.choice(living) if len(living) > 1 else living[0]
            self._note("bootstrap crash", f"{which.name} for {down_s:.2f} s")
            self._platform.crash_bootstrap(down_s, which.number)

    async def _pause_bootstrap(self) -> None:
        process = self._platform.bootstrap.process
        for_s = self._random.choice(SHORT_OR_LONG_S)
        self._note("bootstrap pause", f"for {for_s:g} s")
        process.pause()
        self._world.network.paused(process)
        await asyncio.sleep(for_s)
        process.resume()

    async def _cut(self) -> None:
        one, other = self._two_hosts()
        both = self._random.random() < 0.5
        await self._cut_off(one, other, both=both, for_s=self._random.choice(SHORT_OR_LONG_S))

    async def _cut_off(self, one: str, other: str, *, both: bool, for_s: float) -> None:
        self._note("cut", f"{one} {'and' if both else 'to'} {other} for {for_s:g} s")
        self._world.network.cut(one, other, both=both)
        self._cuts.append((one, other, both))
        await asyncio.sleep(for_s)
        self._cuts.remove((one, other, both))
        self._world.network.mend(one, other, both=both)

    async def _reset(self) -> None:
        one, other = self._two_hosts()
        self._note("reset", f"{one} and {other}")
        self._world.network.reset(one, other)

    async def _drain(self) -> None:
        worker = self._any_worker()
        if worker is not None:
            self._note("drain", worker.name)
            for each in self._platform.sides_of(worker):
                each.ask_to_stop()

    async def _weigh(self) -> None:
        """Change a worker's weight. This is no fault: nothing fails, waits or ends by it."""
        number = self._random.randrange(self._world.shape.both or 1)
        prefill = self._random.choice((0, 0, 10, 50, 90, 100, 100))
        with suppress(UnknownWorker):
            self._platform.bootstrap.rooms.weigh(f"both-{number}", prefill)
            self._world.trace.note(self._world.loop.time(), f"both-{number}", "weight", 0, str(prefill))

    async def _storm(self) -> None:
        self._note("storm", "")
        self._clients.storm()

    def _two_hosts(self) -> tuple[str, str]:
        bootstraps = map(bootstrap_name, range(self._world.shape.bootstraps))
        one, other = self._random.sample([*bootstraps, *self._platform.workers], 2)
        return one, other
