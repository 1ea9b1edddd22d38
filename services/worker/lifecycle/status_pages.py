"""What does each process of a worker answer on /metrics, /started, /health and /ready?

The first three are its own affair; whether it is ready, others have a say in (`honest-health`). Of a process
that serves both sides each side has its own pages, and tells what is wrong with either: who asks one of them
asks for the process.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from prometheus_client import CollectorRegistry

from baton.runtime.listening_ports import bind_port
from baton.runtime.worker_settings import WorkerSettings
from baton.web.http_server import HttpServer
from baton.web.status_pages import serve_metrics
from baton.worker.step_thread import STEP_MS

STUCK_MS: Final = 60_000
"""Turns are short and idle ones end every second: a silence this long means that the loop hangs."""
STARTING: Final = "still starting"


class Progress(Protocol):
    """What a worker's turns tell of themselves."""

    @property
    def turn(self) -> int:
        """How many have ended."""

    def stuck_ms(self) -> int | None:
        """Since a turn ended; None before the first has."""

    def step_ms(self) -> int:
        """Since a step began that has not ended."""


class StatusPages:
    """Made before the slow part of a start: a busy port fails first."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Raises StartupError for a port that is in use."""
        self._socket = bind_port(settings.host, settings.metrics_port, settings.metrics_port_flag)
        self._server: HttpServer | None = None
        self._role = settings.role
        self._problem: Callable[[], str | None] = lambda: STARTING
        self._progress: Progress | None = None
        self._other: StatusPages | None = None

    @property
    def port(self) -> int:
        """Where they are served; 0 while they are not."""
        return 0 if self._server is None else self._server.port

    async def start(
        self, registry: CollectorRegistry, problem: Callable[[], str | None], progress: Progress
    ) -> None:
        """Serve from now on. `problem`: why no room can come, or None."""
        self._problem, self._progress = problem, progress
        own = StatusPages._unstarted, StatusPages._unhealthy, StatusPages._unready
        self._server = await serve_metrics(
            self._socket, registry, *(partial(self._told, each) for each in own)
        )

    def beside(self, other: "StatusPages") -> None:
        """They are of one process."""
        self._other, other._other = other, self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    def _told(self, own: Callable[["StatusPages"], list[str]]) -> list[str]:
        """Its own problems, and those of the other side."""
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
