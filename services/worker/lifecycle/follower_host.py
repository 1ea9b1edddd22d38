"""Process of a rank that does not lead its worker. It takes turns with its group and serves no calls.

Only the leader is registered, called and told to stop. The leader's commands reach this rank in the turns,
and this rank leaves when all ranks agree. It reports its own evidence of rooms to the bootstraps that its
leader names, as its leader does.
"""

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from typing import Any, Final

from prometheus_client import CollectorRegistry

from baton.ids import Incarnation
from baton.runtime.clock import SystemClock
from baton.runtime.errors import GroupLost
from baton.runtime.garbage_collection import freeze_loaded_objects
from baton.runtime.logging import Log
from baton.runtime.service_process import end_now
from baton.runtime.worker_settings import WorkerSettings
from baton.wire.channel import Channels
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity
from baton.worker.lifecycle.status_pages import Progress, StatusPages
from baton.worker.mailbox import Mailbox
from baton.worker.reporter import RankReporter

log = Log(__name__)

FLUSH_S: Final = 1.0
"""Longest time in seconds to send the last timeline lines after all ranks have agreed to leave."""


class FollowerHost:
    """Process-wide parts of a rank that does not lead: status pages, mailbox and reporter. They are made
    before the engine is loaded, so that a port in use is noticed first."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Bind the port of the status pages. Raises StartupError if it is in use."""
        self._settings = settings
        self._pages = StatusPages(settings)
        self._problem: str | None = "still starting"
        self.mailbox = Mailbox()
        self.channels = Channels.showing(Identity.of(settings.tls), settings.run_token)
        addresses = settings.bootstrap
        self.reporter = RankReporter(
            lambda address: self.channels.to(address, ServiceRole.BOOTSTRAP),
            settings.rank or 0,
            SystemClock(),
            addresses[0] if len(addresses) == 1 else None,
        )

    def led_by(self, leader: Incarnation, credential: bytes) -> None:
        """Set the incarnation of the worker and the credential of its ranks, which the leader has sent."""
        self.reporter.led_by(leader, credential)

    async def start_pages(self, registry: CollectorRegistry, progress: Progress) -> None:
        """Serve /metrics, /started, /health and /ready from now on."""
        await self._pages.start(registry, lambda: self._problem, progress)
        log.info("listening", worker=self._settings.name, metrics_port=self._pages.port, pid=os.getpid())

    async def serve(
        self,
        turns: Coroutine[Any, Any, None],
        broken: tuple[type[Exception], ...],
        shutdown: asyncio.Event,
    ) -> int:
        """Take turns until all ranks agree to leave. Return the exit code of the process.

        Raises the error that ended the turns. For an error of a type in `broken` it does not return: the
        process ends.
        """
        self._problem = None
        freeze_loaded_objects()
        helpers = [asyncio.create_task(_log_termination(shutdown)), asyncio.create_task(self.reporter.run())]
        try:
            await turns
        except broken as error:
            end_now(GroupLost(f"{self._settings.name}: {error}"))
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self.reporter.flush()
        return 0

    async def close(self) -> None:
        await self.channels.close()
        await self._pages.stop()


async def _log_termination(shutdown: asyncio.Event) -> None:
    await shutdown.wait()
    log.warning("asked to stop: the leader decides when, ask it; a second signal ends this rank at once")
