"""Thread that renews the worker's leases, so that turns do not delay renewals.

The thread has its own event loop, in which a `LeaseKeeper` runs for each bootstrap. Callbacks of the keepers
run in the worker's loop. The worker's loop also makes the samples of load that renewals carry, because tables
change during a turn.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from baton.ids import NO_OPENER, Incarnation, Opener
from baton.wire.baton.v1 import workers_pb2
from baton.wire.bootstrap_addresses import BootstrapAddresses
from baton.wire.channel import Channels
from baton.wire.service_role import ServiceRole
from baton.worker.lifecycle.bootstrap_leases import BootstrapLeases, OnRouters
from baton.worker.lifecycle.lease_keeper import LeaseKeeper

STOP_S: Final = 1.0
"""Longest wait in seconds for the lease thread to end. It ends with the process in any case."""

Result = TypeVar("Result")


class LeaseThread:
    """Lease keepers that run in a thread of their own. Used from the worker's event loop."""

    def __init__(
        self,
        addresses: BootstrapAddresses,
        channels: Channels,
        registration: workers_pb2.RegisterRequest,
        on_departed: Callable[[Sequence[Incarnation]], None],
        on_renewal: Callable[[bool], None],
        holds: Callable[[Opener], workers_pb2.RenewRequest],
        turns: Callable[[], int],
        on_routers: OnRouters = lambda _routers, _gone: None,
    ) -> None:
        """Start the thread. `channels`: channels for use in threads, which it owns from now on.

        `on_routers`: see `BootstrapLeases`. The other arguments are those of `LeaseKeeper`. All but `turns`,
        which the thread calls, are called in the worker's loop.
        """
        self._registration, self._turns = registration, turns
        self._on_departed = on_departed
        self._worker = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._channels = channels
        self._holds = holds
        self._samples: Mapping[Opener, workers_pb2.RenewRequest] = {NO_OPENER: holds(NO_OPENER)}
        """Last samples of the load, by the opener to which each is sent."""
        self._sampling = False
        """Whether the worker's loop was asked for a new sample of its load, and has not made it yet."""
        self._renews_now = False
        """Whether all leases are renewed in the next round of the worker's loop."""
        self._on_renewal = on_renewal
        self._leases = BootstrapLeases(
            addresses,
            self._make_keeper,
            lambda routers, gone: self._notify(on_routers, routers, gone),
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="lease", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """Reason for which the worker has no lease, as text. None if it has one."""
        return self._leases.problem

    @property
    def proven(self) -> bool:
        return self._leases.proven

    @property
    def missing(self) -> list[str]:
        return self._leases.missing

    @property
    def census(self) -> tuple[int, int]:
        return self._leases.census

    async def run(self) -> None:
        """Register the worker, and renew its leases until cancelled. Raises DeclaredGone."""
        await self._there(self._leases.run())

    async def drain(self, *, broken: bool = False) -> int:
        return await self._there(self._leases.drain(broken=broken))

    async def leave(self) -> None:
        await self._there(self._leases.leave())

    async def stop(self) -> None:
        """End the lease thread, and wait for its end at most a bounded time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._there(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, STOP_S)

    def renew_now(self) -> None:
        """Renew all leases soon, with the worker's present load, instead of when they are due."""
        if not self._renews_now:
            self._renews_now = True
            self._worker.call_soon(self._renew_now)

    # ---- in the thread

    async def _end(self) -> None:
        """Close the channels, and wait for the end of all tasks of the thread, which are cancelled."""
        await self._channels.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _make_keeper(self, address: str, on_opener: Callable[[Opener, Opener], None]) -> LeaseKeeper:
        def channel() -> Any:
            return self._channels.to(address, ServiceRole.BOOTSTRAP)

        def tried(has_lease: bool) -> None:
            """Pass the result of one attempt to renew the lease to the worker's loop. The next attempt uses a
            channel with the present certificate."""
            keeper.reach(channel())
            self._notify(self._on_renewal, has_lease)

        keeper = LeaseKeeper(
            channel(),
            self._registration,
            lambda gone: self._notify(self._on_departed, gone),
            tried,
            self._sampled,
            self._turns,
            on_opener,
        )
        return keeper

    def _sampled(self, opener: Opener) -> workers_pb2.RenewRequest:
        """Return the last sample of the worker's load and its numbers of rooms and pages. Ask the worker's
        loop for the next samples."""
        if not self._sampling:
            self._sampling = True
            self._notify(self._take_samples, list(self._leases.routers))
        return self._samples.get(opener) or self._samples[NO_OPENER]

    def _notify(self, callback: Callable[..., None], *news: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, because the process ends
            self._worker.call_soon_threadsafe(callback, *news)

    # ---- in the worker's loop

    def _take_samples(self, openers: Sequence[Opener]) -> None:
        self._samples = {each: self._holds(each) for each in (*openers, NO_OPENER)}
        self._sampling = False

    def _renew_now(self) -> None:
        self._renews_now = False
        self._take_samples(list(self._leases.routers))
        with suppress(RuntimeError):  # the thread has ended, because the process ends
            self._loop.call_soon_threadsafe(self._leases.renew_now)

    async def _there(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the event loop of the lease thread, and return its result. Cancelling this call
        cancels the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
