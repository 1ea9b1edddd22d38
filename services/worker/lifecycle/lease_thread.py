"""Thread that renews the worker's lease, so that turns do not delay renewals.

The thread has its own event loop, in which a `LeaseKeeper` runs. Callbacks of the keeper run in the worker's
loop. The worker's loop also makes the samples of load that renewals carry, because tables change during a
turn.
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
"""Longest wait in seconds for the lease thread to end. It ends with the process in any case."""

Result = TypeVar("Result")


class LeaseThread:
    """Lease keeper that runs in a thread of its own. Used from the worker's event loop."""

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
        """Start the thread. `channels`: channels for use in threads, which it owns from now on.

        The other arguments are those of `LeaseKeeper`. All but `turns`, which the thread calls, are called in
        the worker's loop.
        """
        self._bootstrap = bootstrap
        self._worker = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._channels = channels
        self._holds = holds
        self._sample = holds()
        self._sampling = False
        """Whether the worker's loop was asked for a new sample of its load, and has not made it yet."""
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
        """Reason for which the worker has no lease, as text. None if it has one."""
        return self._keeper.problem

    @property
    def proven(self) -> bool:
        return self._keeper.proven

    async def run(self) -> None:
        """Register the worker, and renew its lease until cancelled. Raises DeclaredGone."""
        await self._there(self._keeper.run())

    async def drain(self, *, broken: bool = False) -> int:
        return await self._there(self._keeper.drain(broken=broken))

    async def leave(self) -> None:
        await self._there(self._keeper.leave())

    async def stop(self) -> None:
        """End the lease thread, and wait for its end at most a bounded time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._there(self._channels.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, STOP_S)

    # ---- in the thread

    def _tried(self, has_lease: bool) -> None:
        """Pass the result of one attempt to renew the lease to the worker's loop. The next attempt uses a
        channel with the present certificate."""
        self._keeper.reach(self._channels.to(self._bootstrap, ServiceRole.BOOTSTRAP))
        self._notify(self._on_renewal, has_lease)

    def _sampled(self) -> workers_pb2.RenewRequest:
        """Return the last sample of the worker's load and its numbers of rooms and pages. Ask the worker's
        loop for the next sample."""
        if not self._sampling:
            self._sampling = True
            self._notify(self._take_sample)
        return self._sample

    def _notify(self, callback: Callable[..., None], *news: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, because the process ends
            self._worker.call_soon_threadsafe(callback, *news)

    # ---- in the worker's loop

    def _take_sample(self) -> None:
        self._sample = self._holds()
        self._sampling = False

    async def _there(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the event loop of the lease thread, and return its result. Cancelling this call
        cancels the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
