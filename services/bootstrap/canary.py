"""Canary requests: small requests of the router's own that test the hand-over through each worker that joins.

A worker gets clients' rooms only after a canary went through it end to end (`honest-health`). The canary is
also the first use of everything, which takes longer: connections, registered memory, kernels. If no prefill
worker is ready, a decode worker that computes prompts gets a canary alone, and then serves alone.

The canary is built like a client's request (`baton.bootstrap.canary_request`).
"""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Final

from baton.api.backend import Hangup, RoomFailed
from baton.bootstrap.room_backend import RoomBackend
from baton.bootstrap.room_controller import RoomController
from baton.fleet.need import Need
from baton.fleet.pair_health import PairId
from baton.fleet.placement import Pair
from baton.fleet.worker_record import Worker, WorkerState
from baton.ids import Incarnation, RoomId
from baton.rooms.phases import Side
from baton.rooms.plurals import counted
from baton.rooms.request import Request
from baton.rooms.worker_facts import CANARY_TOKENS
from baton.runtime.logging import Log

log = Log(__name__)

LOOK_S: Final = 0.1
RETRY_S: Final = 1.0
TIMEOUT_S: Final = 60.0
REQUEST_ID: Final = "canary"
ALONE_MS: Final = 10_000
"""Time for which a decode worker that computes prompts waits for a prefill worker before its canary is sent
to it alone, in milliseconds.

A prefill worker that was started together with it has mostly registered by then. One that registers later
gets a canary of its own.
"""
OUTPUT_TOKENS: Final = 2
PROMPT_TOKENS: Final = CANARY_TOKENS + 1 - OUTPUT_TOKENS
"""Number of prompt tokens of a canary. With the output, whose last token needs no KV, the canary takes
CANARY_TOKENS positions."""


class Canary:
    """Task that sends one canary at a time, through joining workers and through broken pairs."""

    def __init__(self, rooms: RoomController, backend: RoomBackend, request: Request) -> None:
        """Make the task. `request`: request made by `canary_request`. Its prompt is replaced for each
        canary."""
        self._rooms = rooms
        self._backend = backend
        self._request = request
        self._tries: Counter[Incarnation | PairId] = Counter()
        """Number of canaries sent so far through each joining worker and each broken pair. Those with fewest
        are next, so that failing ones do not keep others from joining."""
        self.alone_tries: Counter[Incarnation] = Counter()
        """Number of canaries sent to each decode worker alone, without a prefill worker."""
        self.problem: str | None = None
        """Text that says why the last canary (test request) failed. None if it passed."""

    async def run(self) -> None:
        """Send canaries to joining workers and broken pairs, until cancelled."""
        while True:
            pair = self.next_pair()
            if pair is None:
                await asyncio.sleep(LOOK_S)
                continue
            self.problem = await self.try_pair(pair)
            if self.problem is not None:
                log.warning("canary failed", cause=self.problem)
                await asyncio.sleep(RETRY_S)

    def next_pair(self) -> Pair | None:
        """Return the pair of workers for the next canary, or None.

        The pair is one of three: the joining worker tried least, with a partner that is ready if possible; a
        broken pair that was tried less often; or a decode worker alone. None of its workers holds a canary's
        room. A worker has only `CANARY_ROOMS` of these, and the room of a failed canary may outlive it.
        """
        registry = self._rooms.registry
        broken, joining = registry.pairs.broken(), registry.joining()
        if not broken and not joining:
            self._tries.clear()
            self.alone_tries.clear()
            return None
        workers = [w for w in registry.workers() if w.state in _USABLE]
        known = [worker.facts.incarnation for worker in workers]
        known_pairs: list[Incarnation | PairId] = [*broken, *known]
        self._tries = Counter({each: self._tries[each] for each in known_pairs})
        self.alone_tries = Counter({each: self.alone_tries[each] for each in known})
        free = [worker for worker in workers if not worker.canaries]
        there = {worker.facts.incarnation for worker in free}
        apart = min(
            (each for each in broken if there.issuperset(each)), key=self._tries.__getitem__, default=None
        )
        least = self._least_tried(free)
        if apart is not None and (least is None or self._tries[apart] < self._tries_of(least[0])):
            self._tries[apart] += 1
            return registry.worker(apart[0]), registry.worker(apart[1])
        alone = self._least_alone(free)
        if alone is not None and (
            least is None or self.alone_tries[alone.facts.incarnation] < self._tries_of(alone)
        ):
            self.alone_tries[alone.facts.incarnation] += 1
            return None, alone
        if least is None:
            return None
        for worker in least:
            self._tries[worker.facts.incarnation] += 1
        return least if least[0].facts.side is Side.PREFILL else (least[1], least[0])

    def _least_tried(self, free: list[Worker]) -> tuple[Worker, Worker] | None:
        """Return the joining worker through which the fewest canaries were sent, with the best partner for
        it. None if no such pair is free."""
        found: list[tuple[Worker, Worker]] = []
        for side in Side:
            own = [each for each in free if each.facts.side is side and each.state is WorkerState.JOINING]
            partners = [each for each in free if each.facts.side is not side]
            if own and partners:
                found.append((min(own, key=self._tries_of), min(partners, key=self._as_partner)))
        return min(
            found, key=lambda pair: (self._tries_of(pair[0]), *self._as_partner(pair[1])), default=None
        )

    def _least_alone(self, free: list[Worker]) -> Worker | None:
        """Return the joining decode worker that computes prompts and had the fewest canaries alone. None
        while a prefill worker is ready, and for workers that joined less than ALONE_MS ago."""
        if self._rooms.registry.ready_count(Side.PREFILL):
            return None
        since_ms = self._rooms.clock.now_ms() - ALONE_MS
        waiting = (
            each
            for each in free
            if each.facts.computes and each.state is WorkerState.JOINING and each.joined_ms <= since_ms
        )
        return min(waiting, key=lambda each: self.alone_tries[each.facts.incarnation], default=None)

    def _tries_of(self, worker: Worker) -> int:
        return self._tries[worker.facts.incarnation]

    def _as_partner(self, worker: Worker) -> tuple[bool, int]:
        """Return the sort key by which a partner for a joining worker is chosen: the worker with the least
        key."""
        return worker.state is not WorkerState.READY, self._tries_of(worker)

    async def try_pair(self, pair: Pair) -> str | None:
        need = Need(PROMPT_TOKENS, CANARY_TOKENS)
        entry = self._rooms.admission.open_on(REQUEST_ID, pair, need)
        request = replace(self._request, prompt=canary_prompt(entry.id))
        workers = [worker for worker in pair if worker is not None]
        names = " and ".join(worker.facts.name for worker in workers)
        stream = self._backend.follow(entry, request)
        drawn, finish = 0, None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while finish is None:
                    batch = await stream.next()
                    drawn, finish = drawn + len(batch.tokens), batch.finish
        except RoomFailed as error:
            return f"{names}: {error}"
        except TimeoutError:
            return f"{names}: no answer in {TIMEOUT_S:g} s"
        finally:
            await stream.hang_up(Hangup.CLIENT_GONE)
        if drawn != OUTPUT_TOKENS:
            return f"{names}: {counted(drawn, 'token')} came, {OUTPUT_TOKENS} were asked for"
        if entry.is_local and len(workers) > 1:
            return f"{names}: nothing was handed over, decode computed the prompt itself"
        for worker in workers:
            self._rooms.proven(worker.facts.incarnation)
        return None


def canary_prompt(room: RoomId) -> tuple[int, ...]:
    """Return the prompt of a canary, as token ids that every vocabulary has. It differs by room, so that no
    worker has it cached: a cached prompt proves no hand-over."""
    return tuple(1 + (room >> 3 * place & 7) for place in range(PROMPT_TOKENS))


_USABLE: Final = frozenset({WorkerState.JOINING, WorkerState.READY})
