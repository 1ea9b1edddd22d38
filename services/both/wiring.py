"""Wiring of one process that is both a prefill and a decode worker.

Each side is a whole worker. It has its own name, incarnation, lease, rooms, pages and turns, and does not
know the other side. Both share the weights and the thread that runs steps. The thread takes steps in the
order in which they were started, so the sides alternate while both have work. The bootstrap knows that they
are one process, and has the weights by which each side is chosen.

Both sides begin and end together: a side that fails ends the other, too.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, Final

from baton.both.settings import BothSettings, side_names
from baton.decode.decode_work import DecodeWork
from baton.decode.metrics import DecodeMetrics
from baton.decode.wiring import fit as fit_decode
from baton.engine_interface import Engine, EnginePairLoader
from baton.prefill.metrics import PrefillMetrics
from baton.prefill.wiring import fit as fit_prefill
from baton.runtime import service_process
from baton.runtime.cpu_affinity import pin
from baton.transfer.nixl_library import install_memory_hooks
from baton.wire import worker_credential
from baton.wire.baton.v1 import workers_pb2
from baton.worker.lifecycle.exit_reporter import ExitReporter
from baton.worker.lifecycle.leader_host import WorkerHost
from baton.worker.prompt_budget import FULL_BUDGET, PromptBudget
from baton.worker.wiring import Fitting, Rank, Start

PREFILL: Final = 0
DECODE: Final = 1
"""Index of the decode side in a pair of values for prefill and decode."""


def run(settings: BothSettings, load: EnginePairLoader) -> int:
    """Run a worker of both sides until a signal stops it. Return the exit code.

    `load`: loads the engines of both sides.
    """
    threads = pin(settings.cpus, settings.threads)
    exit_reporter, settings = ExitReporter.prepare(settings, side_names(settings.name))

    async def main(shutdown: asyncio.Event) -> int:
        install_memory_hooks()
        exit_reporter.begin(settings)
        try:
            return await serve_both(settings, partial(load, settings.of_engine, threads), shutdown)
        finally:
            await exit_reporter.end()

    return service_process.run(main)


async def serve_both(
    settings: BothSettings, load: Callable[[], tuple[Engine, Engine]], shutdown: asyncio.Event
) -> int:
    """Run the prefill and the decode side of this process until both have ended. Return the exit code. Raises
    the error that ends either side."""
    engines, sides = SharedEngines(load), (settings.of_prefill, settings.of_decode)
    words = [worker_credential.draw() for _ in sides]
    mine = [worker_credential.incarnation_of(word) for word in words]
    hosts: list[WorkerHost] = []
    try:
        for each, incarnation, word in zip(sides, mine, words, strict=True):
            hosts.append(WorkerHost(each, incarnation, word))
        hosts[PREFILL].share_problems(hosts[DECODE])
        starts: list[Start[Any]] = [
            Start(
                each,
                partial(engines.of, place),
                hosts[place],
                mine[place],
                worker_credential.of_ranks(words[place]),
                workers_pb2.OtherSide(
                    incarnation=mine[1 - place],
                    process=settings.name,
                    prefill_weight=settings.prefill_weight,
                ),
                engines.thread,
            )
            for place, each in enumerate(sides)
        ]
        count = partial(DecodeMetrics, max_running=settings.max_running)
        return await _together(
            starts[PREFILL].serve(PrefillMetrics, engines.fit_prefill, shutdown),
            starts[DECODE].serve(count, engines.fit_decode, shutdown),
        )
    finally:
        await asyncio.gather(*(host.close() for host in hosts))
        engines.close()


async def _together(*sides: Any) -> int:
    """Run the coroutines of both sides. Return the larger of their exit codes.

    Raises the first error once the other side has ended, too.
    """
    running = [asyncio.create_task(each) for each in sides]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        return max(each.result() for each in _failed_first(running) if each.done())
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _failed_first(tasks: list[asyncio.Task[int]]) -> list[asyncio.Task[int]]:
    return sorted(tasks, key=lambda each: not (each.done() and each.exception() is not None))


class SharedEngines:
    """Engines of both sides over one set of weights, loaded once, and the thread that runs the steps of
    both."""

    def __init__(self, load: Callable[[], tuple[Engine, Engine]]) -> None:
        self._load = load
        self._loading = Lock()
        self._engines: tuple[Engine, Engine] | None = None
        self._failed: Exception | None = None
        self._prompt_budget: PromptBudget = FULL_BUDGET
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine", initializer=self._bind)
        self.thread = BorrowedThread(self._pool)

    def of(self, side: int) -> Engine:
        """Return the engine of one side. The first call loads the engines of both sides, and blocks
        meanwhile. Raises the error of loading."""
        with self._loading:
            if self._failed is not None:
                raise self._failed
            if self._engines is None:
                try:
                    self._engines = self._load()
                except Exception as error:
                    self._failed = error
                    raise
        return self._engines[side]

    def fit_prefill(self, rank: Rank[Any], metrics: PrefillMetrics) -> Fitting:
        return fit_prefill(rank, metrics, self)

    def fit_decode(self, rank: Rank[Any], metrics: DecodeMetrics) -> Fitting:
        fitted = fit_decode(rank, metrics)
        if isinstance(fitted.work, DecodeWork):
            self._prompt_budget = fitted.work.prompt_budget
        return fitted

    def close(self) -> None:
        """End the thread of the engines after the running step."""
        self._pool.shutdown(wait=False)

    def _bind(self) -> None:
        self.of(DECODE).bind_thread()

    # ---- as the prompt budget of the prefill side: that of the decode side, once it is made

    def chunk_tokens(self, most: int) -> int:
        return self._prompt_budget.chunk_tokens(most)

    def stepped(self, tokens: int, ms: float) -> None:
        self._prompt_budget.stepped(tokens, ms)


class BorrowedThread(Executor):
    """Executor that runs work on a thread which several users share. A user cannot end the thread."""

    def __init__(self, thread: Executor) -> None:
        self._thread = thread

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._thread.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: the owner of the thread ends it."""
