"""What does each process of a worker answer on /metrics, /health and /ready?"""

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry

from services.runtime.http_server import HttpServer
from services.runtime.listen import bind_port
from services.runtime.metrics_http import serve_metrics
from services.runtime.worker_settings import WorkerSettings

STUCK_MS: Final = 60_000
"""Turns are short and idle ones end every second: a silence this long means that the loop hangs."""


class WorkerPages:
    """Made before the slow part of a start: a busy port fails first."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Raises StartupError for a port that is in use."""
        self._socket = bind_port(settings.host, settings.metrics_port, "--metrics-port")
        self._server: HttpServer | None = None

    @property
    def port(self) -> int:
        """Where they are served; 0 while they are not."""
        return 0 if self._server is None else self._server.port

    async def start(
        self, registry: CollectorRegistry, problem: Callable[[], str | None], stuck_ms: Callable[[], int]
    ) -> None:
        """Serve from now on. `problem`: why no room can come, or None. `stuck_ms`: since a turn ended."""

        def unhealthy() -> list[str]:
            stuck = problem() is None and stuck_ms() > STUCK_MS
            return [f"no turn has ended for {stuck_ms()} ms"] if stuck else []

        def unready() -> list[str]:
            found = problem()
            return [found] if found else []

        self._server = await serve_metrics(self._socket, registry, unhealthy, unready)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
