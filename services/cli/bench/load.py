"""How does a server do under load, kept at so many requests at a time or at so many a second?

Closed: each of N callers asks anew as soon as it was answered. Open: requests come by a schedule, whatever
has become of those before them; a server that is too slow sees them pile up, up to a bound.
"""

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from baton.cli.bench.answers import REFUSALS, Answer, AnswerFailed, understand
from baton.cli.bench.stream_client import ConnectionPool, Reply, ServerAddress, ServerBroke
from baton.cli.bench.workload import Ask

OPENED_BEFORE: Final = 32
"""Connections, so that the first requests of a schedule do not wait for theirs."""


@dataclass(slots=True)
class LoadOutcome:
    """What became of one round of requests."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    refused: int = 0
    """How often a server said that it is too busy, those times included after which it was asked again."""
    wall_s: float = 0.0
    """From the first request to the last byte."""
    client_cpu_s: float = 0.0
    """Of this process, meanwhile."""


class LoadGenerator:
    """Asks one server. Times are taken as answers come in; understanding them waits for the round's end."""

    def __init__(self, server: ServerAddress, path: str, timeout_s: float) -> None:
        self._server = server
        self._path = path
        self._connections = ConnectionPool(server)
        self._timeout_s = timeout_s
        self._replies: list[tuple[float, Reply]] = []
        self._failures: list[str] = []

    async def closed(self, asks: Sequence[Ask], concurrency: int) -> LoadOutcome:
        await self._connections.open(min(concurrency, len(asks)))
        todo = iter(asks)

        async def caller() -> None:
            for ask in todo:
                await self._ask(ask, None)

        with self._measured() as outcome:
            await asyncio.gather(*(caller() for _ in range(concurrency)))
        return outcome

    async def open(self, asks: Sequence[Ask], in_flight_max: int) -> LoadOutcome:
        """By each one's `at_s`; beyond `in_flight_max` at a time they wait here, which counts as waiting."""
        await self._connections.open(min(in_flight_max, len(asks), OPENED_BEFORE))
        places = asyncio.Semaphore(in_flight_max)
        with self._measured() as outcome:
            started = time.perf_counter()

            async def one(ask: Ask, due: float) -> None:
                try:
                    await self._ask(ask, due)
                finally:
                    places.release()

            async with asyncio.TaskGroup() as group:
                for ask in asks:
                    due = started + ask.at_s
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    await places.acquire()
                    group.create_task(one(ask, due))
        return outcome

    def close(self) -> None:
        self._connections.close()

    async def _ask(self, ask: Ask, due: float | None) -> None:
        """Never raises: a failed request is part of the result. Without a schedule it is due now: what it
        loses with a connection that broke, and is asked for again, is part of its wait."""
        request = self._server.post(self._path, ask.body)
        if due is None:
            due = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._connections.ask(request)
        except ServerBroke as error:
            self._failures.append(str(error))
        except TimeoutError:
            self._failures.append(f"no whole answer within {self._timeout_s:g} s")
        else:
            self._replies.append((due, reply))

    @contextmanager
    def _measured(self) -> Iterator[LoadOutcome]:
        with undisturbed() as outcome:
            yield outcome
        replies, self._replies = self._replies, []
        outcome.failures, self._failures = self._failures, []
        for due, reply in replies:
            outcome.refused += reply.status in REFUSALS
            try:
                outcome.answers.append(understand(reply, due))
            except AnswerFailed as error:
                outcome.failures.append(str(error))


@contextmanager
def undisturbed() -> Iterator[LoadOutcome]:
    """One whose times are taken meanwhile. The collector rests: its pauses would be read as the server's."""
    outcome = LoadOutcome()
    gc.collect()
    gc.disable()
    started, cpu = time.perf_counter(), time.process_time()
    try:
        yield outcome
    finally:
        outcome.wall_s = time.perf_counter() - started
        outcome.client_cpu_s = time.process_time() - cpu
        gc.enable()
