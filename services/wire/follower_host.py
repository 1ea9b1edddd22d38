"""How does the process of a rank live that does not lead? It turns with its group; nobody outside calls it.

The leader alone is registered, called and told to stop: what it hears reaches this rank as commands, and this
one leaves when all agree to.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import CollectorRegistry

from services.runtime.errors import GroupLost
from services.runtime.logging import Log
from services.runtime.serve import end_now
from services.runtime.worker_settings import WorkerSettings
from services.wire.mailbox import Mailbox
from services.wire.reporter import SilentReporter
from services.wire.worker_pages import WorkerPages

log = Log(__name__)


class FollowerHost:
    """Made before the slow part of a start: a busy port fails first."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Raises StartupError for a port that is in use."""
        self._settings = settings
        self._pages = WorkerPages(settings)
        self._problem: str | None = "still starting"
        self.mailbox = Mailbox()
        self.reporter = SilentReporter()

    async def start_pages(self, registry: CollectorRegistry, stuck_ms: Callable[[], int]) -> None:
        """Serve /metrics, /health and /ready from now on. `stuck_ms`: since a turn last ended."""
        await self._pages.start(registry, lambda: self._problem, stuck_ms)
        log.info("listening", worker=self._settings.name, metrics_port=self._pages.port, pid=os.getpid())

    async def serve(
        self,
        turns: Coroutine[Any, Any, None],
        broken: tuple[type[Exception], ...],
        shutdown: asyncio.Event,
    ) -> int:
        """Turn until the group leaves. Returns the exit code. Raises what ended the turns; when that is one
        of `broken` it does not return: the process ends."""
        self._problem = None
        asked = asyncio.create_task(_tell_asked(shutdown))
        try:
            await turns
        except broken as error:
            end_now(GroupLost(f"{self._settings.name}: {error}"))
        finally:
            asked.cancel()
        return 0

    async def close(self) -> None:
        await self._pages.stop()


async def _tell_asked(shutdown: asyncio.Event) -> None:
    await shutdown.wait()
    log.warning("asked to stop: the leader decides when, ask it; a second signal ends this rank at once")
