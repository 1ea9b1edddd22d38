"""One seed, one run: a whole Baton, its clients and what goes wrong, on virtual time."""

import asyncio
import gc
import logging
import random
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from baton.api.backend import Hangup, RoomFailed
from baton.fleet.need import Need
from baton.fleet.worker_record import Worker
from baton.rooms.phases import Side
from tests.sim.bootstrap import SimulatedBootstrap
from tests.sim.checks import QUIET, amplified, deaf, dirty, mistaken, unexplained, unrest
from tests.sim.clients import Clients, make_request
from tests.sim.engine import StepFault, answer
from tests.sim.fabric import WatchedFabric
from tests.sim.faults import Faults
from tests.sim.loop import START_S, Deadlock, Livelock, VirtualLoop
from tests.sim.network import CALM, Network
from tests.sim.platform import Platform
from tests.sim.profile import Profile, profile
from tests.sim.rank import World
from tests.sim.trace import Trace, Violation

ROOMS: Final = 250
READY_S: Final = 90.0
"""Time in which everything is ready, at first and after all faults were repaired, seconds."""
LAST_TRIES: Final = 3
"""Tries of each last request. A connection that broke unused is found out by a room that fails, and is made
anew."""
REST_S: Final = 150.0
"""Time in which everything comes to rest, seconds. The registry waits for reports of rooms for a minute."""


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    shape: Profile
    rooms: int
    violations: tuple[Violation, ...]
    faults: Counter[str]
    outcomes: Counter[str]
    """Number of requests by their end. "for now": they were sent again."""
    deeds: Counter[str]
    digest: str
    """Hash of all events in order, equal for equal seeds."""
    virtual_s: float
    steps: int
    seconds: float
    timeline: tuple[str, ...] = field(default=(), repr=False)


def run(seed: int, rooms: int = ROOMS, name: str | None = None, *, tidy: bool = True) -> Report:
    """Simulate. `name`: of a profile, instead of the seed's own. `tidy`: collect what is left over, which
    takes a sixteenth of the time; a process that ends soon need not."""
    product = logging.getLogger("baton")
    before = (product.level, product.propagate)
    product.setLevel(logging.ERROR)
    product.propagate = False
    gc.freeze()
    gc.disable()
    # Processes that died, or were cut short by the end, leave coroutines that resent being collected.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = _simulate(seed, rooms, name)
            if tidy:
                gc.collect()
    finally:
        sys.unraisablehook = hook
        if tidy:
            gc.enable()
            gc.unfreeze()
        product.setLevel(before[0])
        product.propagate = before[1]
    return report


def _simulate(seed: int, rooms: int, name: str | None) -> Report:
    started_s = time.process_time()
    shape = profile(seed, rooms, name)
    loop, trace = VirtualLoop(), Trace()
    errors = _Errors(trace, loop)
    logging.getLogger("baton").addHandler(errors)
    asyncio.set_event_loop(loop)
    try:
        scene = _Scene(seed, shape, loop, trace, rooms)
        loop.run_until(loop.create_task(scene.play()))
    except (Deadlock, Livelock) as error:
        trace.violate(loop.time(), "room-ends", f"{type(error).__name__}: {error}")
    finally:
        asyncio.set_event_loop(None)
        logging.getLogger("baton").removeHandler(errors)
        logging.getLogger("baton").setLevel(logging.CRITICAL + 1)  # what is left over is only collected
    for problem in loop.problems:
        trace.violate(loop.time(), "moves-listed", problem)
    loop.forget()
    return Report(
        seed=seed,
        shape=shape,
        rooms=scene.rooms_opened(),
        violations=tuple(trace.violations),
        faults=trace.faults,
        outcomes=scene.clients.outcomes,
        deeds=scene.deeds(),
        digest=trace.digest(),
        virtual_s=loop.time() - START_S,
        steps=loop.steps,
        seconds=time.process_time() - started_s,
        timeline=tuple(trace.lines()),
    )


class _Scene:
    def __init__(self, seed: int, shape: Profile, loop: VirtualLoop, trace: Trace, rooms: int) -> None:
        name = str(seed)
        network = Network(loop, trace, name, CALM)
        fabric = WatchedFabric(shape.writes, loop, network, trace)
        self._world = World(loop, network, fabric, trace, shape, random.Random(f"{name}/world"))
        self._platform = Platform(self._world, name)
        self.clients = Clients(self._world, self._platform, name, rooms)
        self._faults = Faults(self._world, self._platform, self.clients, name)

    def rooms_opened(self) -> int:
        """Rooms opened by all incarnations of the bootstrap, with canaries and retries."""
        return sum(each.opened() for each in self._platform.bootstraps)

    def deeds(self) -> Counter[str]:
        """Return the product's reactions."""
        done: Counter[str] = Counter()
        for worker in self._platform.everyone:
            sample = worker.leader.registry.get_sample_value("baton_kv_revocations_total")
            done["revocation"] += int(sample or 0)
            reused = worker.leader.registry.get_sample_value("baton_prefix_reused_tokens_total")
            done[f"tokens reused by {worker.side.value}"] += int(reused or 0)
            computed = worker.leader.registry.get_sample_value("baton_decode_local_rooms_total")
            done["local room"] += int(computed or 0)
            adopted = worker.leader.registry.get_sample_value("baton_rooms_adopted_total")
            done[f"room adopted from {worker.side.value}"] += int(adopted or 0)
        done["retraction"] = sum(each.retractions for each in self._world.grown.values())
        for bootstrap in self._platform.bootstraps:
            for entry in bootstrap.registry.rooms():
                done["kept at home"] += entry.is_same_process
                if entry.cause is not None:
                    done[f"room failed: {entry.cause.reason.value}"] += 1
        return done

    async def play(self) -> None:
        self._platform.start()
        if not await self._ready("at the start"):
            return
        self._faults.start()
        listening = self._world.loop.create_task(self._listen())
        await self.clients.run()
        listening.cancel()
        self._faults.heal()
        if await self._ready("after everything was mended"):
            await self._rest()
            await self._last_requests()
        await self._rest()
        for invariant, text, room in unexplained(self._platform, self._world.trace.faults):
            self._violate(invariant, text, room)
        sent = sum(self._world.network.sent[method] for method in ("RunRooms", "StreamRooms"))
        for text, room in amplified(self._platform, self._world.trace.faults, sent):
            self._violate("failure-adds-no-load", text, room)
        for invariant, text, room in mistaken(self._platform):
            self._violate(invariant, text, room)
        for text in dirty(self._platform):
            self._violate("slot-zero", text)

    async def _ready(self, when: str) -> bool:
        loop = self._world.loop
        ends = loop.time() + READY_S
        while not self._platform.all_ready():
            if loop.time() > ends:
                for bootstrap in self._platform.present:
                    workers = bootstrap.registry.workers()
                    states = {worker.facts.name: worker.state.value for worker in workers}
                    text = f"not all workers are ready {when}: {states}, canary: {bootstrap.canary.problem}"
                    self._violate("reconnect", text)
                return False
            await asyncio.sleep(0.1)
        return True

    async def _listen(self) -> None:
        known_s: dict[int, float] = {}
        while set(self._world.trace.faults) <= QUIET:
            for text, room in deaf(self._platform, self._world.loop.time(), known_s):
                self._violate("terminal-reaches-peer", text, room)
            await asyncio.sleep(0.5)

    async def _last_requests(self) -> None:
        """Send a last request to every pair, each of which has to serve."""
        draw = random.Random(1)
        for bootstrap in self._platform.present:
            workers = bootstrap.registry.workers()
            for prefill in [each for each in workers if each.facts.side is Side.PREFILL]:
                for decode in [each for each in workers if each.facts.side is Side.DECODE]:
                    await bootstrap.process.spawn(self._last(draw, bootstrap, (prefill, decode)))

    async def _last(
        self, draw: random.Random, bootstrap: SimulatedBootstrap, pair: tuple[Worker, Worker]
    ) -> None:
        for attempt in range(LAST_TRIES):
            request = make_request(draw, draw.getrandbits(60), replace(self._world.shape, several=0.0))
            need = Need(request.prefill_tokens, request.tokens_max)
            entry = bootstrap.rooms.admission.open_on(request.request_id, pair, need)
            stream = bootstrap.backend.follow(entry, request)
            tokens: list[int] = []
            try:
                finish = None
                while finish is None:
                    batch = await stream.next()
                    tokens.extend(token.id for token in batch.tokens)
                    finish = batch.finish
            except RoomFailed as error:
                if attempt == LAST_TRIES - 1:
                    names = " and ".join(worker.facts.name for worker in pair)
                    self._violate("reconnect", f"{names} do not serve any more: {error}", entry.id)
                await asyncio.sleep(1.0)
            else:
                if tokens != answer(request):
                    self._violate("stale-never-served", f"the last request got {tokens}", entry.id)
                return
            finally:
                await stream.hang_up(Hangup.CLIENT_GONE)

    async def _rest(self) -> None:
        loop = self._world.loop
        ends = loop.time() + REST_S
        await asyncio.sleep(0.5)
        while unrest(self._platform):
            if loop.time() > ends:
                for text in unrest(self._platform):
                    self._violate("zero-at-idle", text)
                return
            await asyncio.sleep(1.0)
        while self._world.fabric.puts_under_way:
            self._world.fabric.step()

    def _violate(self, invariant: str, text: str, room: int = 0) -> None:
        self._world.trace.violate(self._world.loop.time(), invariant, text, room)


class _Errors(logging.Handler):
    """Log handler for which every error of the product is a bug, except errors of steps."""

    def __init__(self, trace: Trace, loop: VirtualLoop) -> None:
        super().__init__(logging.ERROR)
        self._trace = trace
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, StepFault):
            return
        self._trace.violate(self._loop.time(), "moves-listed", f"{record.getMessage()}: {error!r}")
