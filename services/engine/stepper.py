"""How does a step of the model run without the turn loop waiting for it?

One thread of its own, one step at a time. The loop starts a step, is called when it has ended, and takes
its tokens in a later turn.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from services.engine.engine import Row
from services.rooms.request import Token
from services.runtime.logging import Log

log = Log(__name__)


class Steps(Protocol):
    def step(self, rows: Sequence[Row]) -> list[Token | None]: ...


class StepFailed(Exception):
    """The engine raised. What the step was to write is not to be used."""


class Stepper:
    """Used from one event loop. `on_done` is called in it when a step has ended."""

    def __init__(self, engine: Steps, on_done: Callable[[], None]) -> None:
        self._engine = engine
        self._on_done = on_done
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._running: asyncio.Future[list[Token | None]] | None = None

    @property
    def free(self) -> bool:
        """No step is running, and the last one's tokens were taken."""
        return self._running is None

    def start(self, rows: Sequence[Row]) -> None:
        """Start a step. Only while `free`."""
        if self._running is not None:
            raise RuntimeError("a step is running")
        loop = asyncio.get_running_loop()
        self._running = loop.run_in_executor(self._thread, self._engine.step, rows)
        self._running.add_done_callback(lambda _: self._on_done())

    def take(self) -> list[Token | None] | None:
        """The ended step's tokens, one entry a row; None while it runs or when there was none.

        Raises StepFailed, once, when the engine raised.
        """
        if self._running is None or not self._running.done():
            return None
        ended, self._running = self._running, None
        error = ended.exception()
        if error is not None:
            log.error("a step failed", error=error)
            raise StepFailed(f"{type(error).__name__}: {error}") from error
        return ended.result()

    def close(self) -> None:
        """Wait for the running step, if any, and end the thread."""
        self._thread.shutdown(wait=True)
