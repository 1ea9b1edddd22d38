"""What does each process of a worker answer on /metrics, /started, /health and /ready?

The first three are its own affair; whether it is ready, others have a say in (`honest-health`).
"""

from collections.abc import Callable
from typing import Final, Protocol

from prometheus_client import CollectorRegistry

from services.runtime.http_server import HttpServer
from services.runtime.listen import bind_port
from services.runtime.metrics_http import serve_metrics
from services.runtime.worker_settings import WorkerSettings
from services.worker.stepper import STEP_MS

STUCK_MS: Final = 60_000
"""Turns are short and idle ones end every second: a silence this long means that the loop hangs."""


class Progress(Protocol):
    """What a worker's turns tell of themselves."""

    @property
    def turn(self) -> int:
        """How many have ended."""

    def stuck_ms(self) -> int | None:
        """Since a turn ended; None before the first has."""

    def step_ms(self) -> int:
        """Since a step began that has not ended."""


class WorkerPages:
    """Made before the slow part of a start: a busy port fails first."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Raises StartupError for a port that is in use."""
        self._socket = bind_port(settings.host, settings.metrics_port, settings.metrics_port_flag)
        self._server: HttpServer | None = None

    @property
    def port(self) -> int:
        """Where they are served; 0 while they are not."""
        return 0 if self._server is None else self._server.port

    async def start(
        self, registry: CollectorRegistry, problem: Callable[[], str | None], progress: Progress
    ) -> None:
        """Serve from now on. `problem`: why no room can come, or None."""

        def unstarted() -> list[str]:
            return ["still starting: no turn has ended yet"] if progress.stuck_ms() is None else []

        def unhealthy() -> list[str]:
            since, step = progress.stuck_ms() or 0, progress.step_ms()
            found = [f"no turn has ended for {since} ms"] if since > STUCK_MS else []
            return found + ([f"a step has been running for {step} ms"] if step > STEP_MS else [])

        def unready() -> list[str]:
            found = problem()
            return [found] if found else []

        self._server = await serve_metrics(self._socket, registry, unstarted, unhealthy, unready)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
