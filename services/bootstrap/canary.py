"""Does a hand-over really pass through a worker that has just joined?

A worker gets rooms only after a small request of our own went through it end to end (`honest-health`). The
canary also pays the first use of everything: connections, registered memory, kernels.
"""

import asyncio
from collections import Counter
from typing import Final

from services.bootstrap.attempts import RoomBackend
from services.bootstrap.rooms import Rooms
from services.openai.backend import Hangup, RoomFailed
from services.rooms.counts import counted
from services.rooms.ids import Incarnation, RoomId
from services.rooms.phases import Side
from services.rooms.placement import Need
from services.rooms.registry import Worker, WorkerState
from services.rooms.request import Request, Sampling
from services.runtime.logging import Log

log = Log(__name__)

LOOK_S: Final = 0.1
RETRY_S: Final = 1.0
TIMEOUT_S: Final = 60.0
REQUEST_ID: Final = "canary"
OUTPUT_TOKENS: Final = 2
PROMPT_TOKENS: Final = 24


class Canary:
    """Runs as one task: one canary at a time."""

    def __init__(self, rooms: Rooms, backend: RoomBackend) -> None:
        self._rooms = rooms
        self._backend = backend
        self._tries: Counter[Incarnation] = Counter()
        """Of the workers that are there: who failed often comes last, and keeps nobody from joining."""
        self.problem: str | None = None
        """Why the last canary failed; None after one that passed."""

    async def run(self) -> None:
        """Try each joining worker with a partner until cancelled."""
        while True:
            pair = self._pair()
            if pair is None:
                await asyncio.sleep(LOOK_S)
                continue
            self.problem = await self._try(pair)
            if self.problem is not None:
                log.warning("canary failed", cause=self.problem)
                await asyncio.sleep(RETRY_S)

    def _pair(self) -> tuple[Worker, Worker] | None:
        """The joining worker tried least, and a partner for it: a ready one if there is one.

        Each without a canary's room: a worker has `CANARY_ROOMS` places for them. The room of a canary that
        failed may outlive it.
        """
        registry = self._rooms.registry
        workers = [w for w in registry.workers() if w.state in _USABLE]
        self._tries = Counter({w.facts.incarnation: self._tries[w.facts.incarnation] for w in workers})
        free = [worker for worker in workers if not worker.canaries]
        pairs = [
            (joining, partner)
            for joining in free
            for partner in free
            if joining.state is WorkerState.JOINING and partner.facts.side is not joining.facts.side
        ]
        if not pairs:
            return None
        joining, partner = min(
            pairs,
            key=lambda pair: (
                self._tries[pair[0].facts.incarnation],
                pair[1].state is not WorkerState.READY,
                self._tries[pair[1].facts.incarnation],
            ),
        )
        for worker in (joining, partner):
            self._tries[worker.facts.incarnation] += 1
        return (joining, partner) if joining.facts.side is Side.PREFILL else (partner, joining)

    async def _try(self, pair: tuple[Worker, Worker]) -> str | None:
        need = Need(PROMPT_TOKENS, PROMPT_TOKENS + OUTPUT_TOKENS - 1)
        entry = self._rooms.admission.open_on(REQUEST_ID, pair, need)
        request = Request(
            request_id=REQUEST_ID,
            prompt=_prompt(entry.id),
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            sampling=Sampling(temperature=0.0),
        )
        names = " and ".join(worker.facts.name for worker in pair)
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
        for worker in pair:
            self._rooms.proven(worker.facts.incarnation)
        return None


def _prompt(room: RoomId) -> tuple[int, ...]:
    """Tokens that every vocabulary has, and no worker a prefix of: what is cached proves no hand-over."""
    return tuple(1 + (room >> 3 * place & 7) for place in range(PROMPT_TOKENS))


_USABLE: Final = frozenset({WorkerState.JOINING, WorkerState.READY})
