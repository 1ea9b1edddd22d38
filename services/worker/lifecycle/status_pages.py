"""Status pages of each process of a worker: /metrics, /started, /health and /ready.

The first three depend on the process alone. Readiness also depends on the lease (`honest-health`). In a
process with both sides, each side has its own pages, and shows the problems of either.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from prometheus_client import CollectorRegistry

from baton.runtime.listening_ports import bind_port
from baton.runtime.worker_settings import WorkerSettings
from baton.web.http_server import HttpServer
from baton.web.probe_pages import serve_metrics
from baton.worker.step_thread import STEP_MS

STUCK_MS: Final = 60_000
"""Milliseconds without a turn after which the turn loop counts as hanging. An idle worker takes a turn every
second."""
STARTING: Final = "still starting"


class Progress(Protocol):
    """Progress of a worker's turns, as its health pages read it."""

    @property
    def turn(self) -> int:
        """Number of turns that this process has ended."""

    def stuck_ms(self) -> int | None:
        """Return the milliseconds since the last turn ended, or None before the first turn has ended."""

    def step_ms(self) -> int:
        """Return for how many milliseconds the running step has been running, or 0 if none is."""


class StatusPages:
    """HTTP status pages of a worker's process. Their port is bound before the engine is loaded, so that a
    port in use is noticed first."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Bind the port of the pages. Raises StartupError if it is in use."""
        self._socket = bind_port(settings.host, settings.metrics_port, settings.metrics_port_flag)
        self._server: HttpServer | None = None
        self._role = settings.role
        self._problem: Callable[[], str | None] = lambda: STARTING
        self._notes: Callable[[], list[str]] = list
        self._progress: Progress | None = None
        self._other: StatusPages | None = None

    @property
    def port(self) -> int:
        """Port of the pages, or 0 while they are not served."""
        return 0 if self._server is None else self._server.port

    async def start(
        self,
        registry: CollectorRegistry,
        problem: Callable[[], str | None],
        progress: Progress,
        notes: Callable[[], list[str]] = list,
    ) -> None:
        """Serve the pages from now on.

        `problem`: function that returns the reason for which the worker takes no rooms, or None. `progress`:
        progress of the turns. `notes`: function that returns texts for `/ready` of a worker that takes rooms.
        """
        self._problem, self._progress, self._notes = problem, progress, notes
        own = StatusPages._unstarted, StatusPages._unhealthy, StatusPages._unready
        self._server = await serve_metrics(
            self._socket,
            registry,
            *(partial(self._problems, each) for each in (*own, StatusPages._noted)),
        )

    def share_problems(self, other: "StatusPages") -> None:
        """Show the problems of both sides of one process on the status pages of each. `other`: pages of the
        other side."""
        self._other, other._other = other, self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    def _problems(self, own: Callable[["StatusPages"], list[str]]) -> list[str]:
        """Return the problems that a status page shows: those of this side, and those of the other side of
        the process, if any. `own`: function that returns the problems of one side."""
        other = self._other
        return own(self) + ([f"{other._role} side: {each}" for each in own(other)] if other else [])

    def _unstarted(self) -> list[str]:
        turned = self._progress is not None and self._progress.stuck_ms() is not None
        return [] if turned else [f"{STARTING}: no turn has ended yet"]

    def _unhealthy(self) -> list[str]:
        if self._progress is None:
            return []
        since, step = self._progress.stuck_ms() or 0, self._progress.step_ms()
        found = [f"no turn has ended for {since} ms"] if since > STUCK_MS else []
        return found + ([f"a step has been running for {step} ms"] if step > STEP_MS else [])

    def _unready(self) -> list[str]:
        found = self._problem()
        return [found] if found else []

    def _noted(self) -> list[str]:
        return self._notes()
