"""How does a worker keep its lease while its own event loop turns?

Its conversation with the bootstrap goes on in a thread of its own, with a loop of its own: what the turns
take, or wait for, holds no renewal up. The keeper is the same as anywhere. What it learns it tells the
worker's loop, and what is told of the worker that loop samples, since tables change while a turn goes on.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from baton.ids import Incarnation
from baton.wire.baton.v1 import workers_pb2
from baton.wire.channel import Channels
from baton.wire.service_role import ServiceRole
from baton.worker.lifecycle.lease_keeper import LeaseKeeper

STOP_S: Final = 1.0
"""What the thread gets to end in. It ends with the process in any case."""

Result = TypeVar("Result")


class LeaseThread:
    """Used from the worker's event loop."""

    def __init__(
        self,
        bootstrap: str,
        channels: Channels,
        registration: workers_pb2.RegisterRequest,
        on_departed: Callable[[Sequence[Incarnation]], None],
        on_renewal: Callable[[bool], None],
        holds: Callable[[], workers_pb2.RenewRequest],
        turns: Callable[[], int],
    ) -> None:
        """`channels`: of threads; this one's own from now on. The rest as of LeaseKeeper: all but `turns`,
        which is read from the thread, are called in this loop."""
        self._bootstrap = bootstrap
        self._worker = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._channels = channels
        self._holds = holds
        self._sample = holds()
        self._sampling = False
        """The worker's loop was asked for the next sample."""
        self._on_renewal = on_renewal
        self._keeper = LeaseKeeper(
            self._channels.to(bootstrap, ServiceRole.BOOTSTRAP),
            registration,
            lambda gone: self._notify(on_departed, gone),
            self._tried,
            self._sampled,
            turns,
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="lease", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """Why the worker holds no lease, or None while it does."""
        return self._keeper.problem

    @property
    def proven(self) -> bool:
        return self._keeper.proven

    async def run(self) -> None:
        """Register and renew until cancelled. Raises DeclaredGone."""
        await self._there(self._keeper.run())

    async def drain(self, *, broken: bool = False) -> int:
        return await self._there(self._keeper.drain(broken=broken))

    async def leave(self) -> None:
        await self._there(self._keeper.leave())

    async def stop(self) -> None:
        """End the thread, within a bound."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._there(self._channels.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, STOP_S)

    # ---- in the thread

    def _tried(self, held: bool) -> None:
        """To renew the lease. The next try goes by a channel that shows the certificate of now."""
        self._keeper.reach(self._channels.to(self._bootstrap, ServiceRole.BOOTSTRAP))
        self._notify(self._on_renewal, held)

    def _sampled(self) -> workers_pb2.RenewRequest:
        """What the worker's loop sampled last. It samples for the next time."""
        if not self._sampling:
            self._sampling = True
            self._notify(self._take_sample)
        return self._sample

    def _notify(self, callback: Callable[..., None], *news: Any) -> None:
        with suppress(RuntimeError):  # that loop was closed: the process ends
            self._worker.call_soon_threadsafe(callback, *news)

    # ---- in the worker's loop

    def _take_sample(self) -> None:
        self._sample = self._holds()
        self._sampling = False

    async def _there(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Have `work` done in the thread, which is cancelled there when it is cancelled here."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
