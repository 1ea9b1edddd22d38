"""Leases of one worker at all bootstraps of its stack: one keeper for each address.

The bootstraps decide nothing together. A worker is ready if it has a lease, and is proven, at one of them. A
lease that ends at one bootstrap ends the rooms of that bootstrap and nothing else. Any of them may report
that an incarnation is gone, and none takes it back (`gone-is-monotone`).

Canaries pass through a worker once for each bootstrap. A canary proves that this very bootstrap reaches both
workers of a pair. So what has passed at one bootstrap says nothing about another.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from baton.ids import NO_OPENER, Opener
from baton.runtime.logging import Log
from baton.wire.bootstrap_addresses import BootstrapAddresses
from baton.worker.lifecycle.lease_keeper import LeaseKeeper

log = Log(__name__)

LOOK_S: Final = 5.0
"""Seconds between two look-ups of the names in `--bootstrap`."""
UNLISTED_S: Final = 30.0
"""Seconds without a lease after which a bootstrap is dropped, if its name does not have its address any
more."""
GONE_MAX: Final = 64
"""Most openers that are remembered as gone, the oldest are forgotten first."""

OnRouters = Callable[[Mapping[Opener, str], Sequence[Opener]], None]
"""Function that is called when the routers of a worker change. Arguments: address of each router by its
opener, and the openers that are gone, the latest last."""


@dataclass(slots=True, eq=False)
class _Lease:
    """Lease at one address, with the task that keeps it."""

    keeper: LeaseKeeper
    task: asyncio.Task[None]
    is_listed: bool = True
    """Whether `--bootstrap` has the address, by the last look-up."""
    without_s: float = 0.0
    """Seconds for which the worker had no lease there, counted while the address was not listed."""


class BootstrapLeases:
    """Set of a worker's lease keepers, by address. Used from one event loop. Any thread may read its
    properties."""

    def __init__(
        self,
        addresses: BootstrapAddresses,
        make_keeper: Callable[[str, Callable[[Opener, Opener], None]], LeaseKeeper],
        on_routers: OnRouters,
    ) -> None:
        """Make a set without leases.

        `make_keeper`: makes the keeper for an address. Its second argument is a function for the keeper to
        call with the former and the new opener at the address.
        """
        self._addresses = addresses
        self._make_keeper = make_keeper
        self._on_routers = on_routers
        self._leases: dict[str, _Lease] = {}
        self._gone: dict[Opener, None] = {}
        self._changed = asyncio.Event()
        self._look_s = LOOK_S

    # ---- what any thread may read

    @property
    def problem(self) -> str | None:
        """Reason for which the worker has no lease anywhere, as text. None if it has one."""
        problems = self._problems()
        if not problems:
            return "not registered yet"
        if None in problems.values():
            return None
        return "; ".join(self._describe(address, str(problem)) for address, problem in problems.items())

    @property
    def proven(self) -> bool:
        """Whether a canary has passed through the worker at a bootstrap where it has a lease."""
        keepers = [each.keeper for each in list(self._leases.values())]
        return any(each.proven and each.problem is None for each in keepers)

    @property
    def missing(self) -> list[str]:
        """Bootstraps at which the worker has no lease, each with the reason, if it has a lease at another."""
        problems = self._problems()
        if None not in problems.values():
            return []
        return [self._describe(address, each) for address, each in problems.items() if each is not None]

    @property
    def census(self) -> tuple[int, int]:
        """Number of leases that the worker has, and of bootstraps that it knows."""
        problems = list(self._problems().values())
        return problems.count(None), len(problems)

    @property
    def routers(self) -> dict[Opener, str]:
        """Address of each bootstrap by its opener. The first address counts if there are several."""
        found: dict[Opener, str] = {}
        for address, lease in list(self._leases.items()):
            if lease.keeper.is_known:
                found.setdefault(lease.keeper.opener, address)
        return found

    def _problems(self) -> dict[str, str | None]:
        return {address: each.keeper.problem for address, each in list(self._leases.items())}

    def _describe(self, address: str, problem: str) -> str:
        return problem if len(self._leases) == 1 else f"{address}: {problem}"

    # ---- in the event loop

    async def run(self) -> None:
        """Keep a lease at each address until cancelled, or until the worker has left. Raises DeclaredGone if
        any bootstrap declared the worker gone."""
        try:
            self._list(await self._addresses.look_up())
            watch = asyncio.create_task(self._watch())
            try:
                await self._until_left(watch)
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        finally:
            tasks = [each.task for each in self._leases.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def renew_now(self) -> None:
        """Renew all leases now, instead of when they are due."""
        for lease in self._leases.values():
            lease.keeper.renew_now()

    async def drain(self, *, broken: bool = False) -> int:
        """Ask each bootstrap to open no more rooms on this worker. Return the number of open rooms for which
        they still wait, all together. A bootstrap that cannot be reached counts 0."""
        keepers = [each.keeper for each in self._leases.values()]
        return sum(await asyncio.gather(*(each.drain(broken=broken) for each in keepers)))

    async def leave(self) -> None:
        """Report to each bootstrap that this worker ends. No renewal follows."""
        keepers = [each.keeper for each in self._leases.values()]
        await asyncio.gather(*(each.leave() for each in keepers))

    async def _until_left(self, watch: asyncio.Task[None]) -> None:
        while keeping := {each.task for each in self._leases.values() if not each.task.done()}:
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            running = keeping if watch.done() else {*keeping, watch}
            try:
                await asyncio.wait({changed, *running}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            for task in running:
                if task.done() and not task.cancelled():
                    task.result()

    async def _watch(self) -> None:
        """Look up the names again and again, if there are any."""
        while self._addresses.may_change:
            await asyncio.sleep(self._look_s)
            self._list(await self._addresses.look_up())

    def _list(self, addresses: Sequence[str]) -> None:
        """Begin a lease at each new address, and drop bootstraps that have gone from the list and from their
        addresses."""
        for address in addresses:
            if address not in self._leases:
                self._begin(address)
        for address, lease in list(self._leases.items()):
            lease.is_listed = address in addresses
            if lease.is_listed or lease.keeper.problem is None:
                lease.without_s = 0.0
            else:
                lease.without_s += self._look_s
            if not lease.is_listed and (lease.without_s >= UNLISTED_S or self._is_elsewhere(lease)):
                self._drop(address)

    def _begin(self, address: str) -> None:
        keeper = self._make_keeper(address, self._met)
        task = asyncio.create_task(keeper.run(), name=f"lease at {address}")
        self._leases[address] = _Lease(keeper, task)
        if len(self._leases) > 1:
            log.info("another bootstrap", address=address)
        self._changed.set()

    def _is_elsewhere(self, lease: _Lease) -> bool:
        """Return whether the bootstrap of a lease is known under a listed address, too."""
        others = (each for each in self._leases.values() if each is not lease and each.is_listed)
        opener = lease.keeper.opener
        return opener != NO_OPENER and any(each.keeper.opener == opener for each in others)

    def _drop(self, address: str) -> None:
        lease = self._leases.pop(address)
        lease.task.cancel()
        log.info("a bootstrap is gone", address=address)
        self._met(lease.keeper.opener, NO_OPENER)
        self._changed.set()

    def _met(self, before: Opener, now: Opener) -> None:
        """Process another opener at an address. The former one is gone, unless it answers elsewhere."""
        known = {each.keeper.opener for each in self._leases.values()}
        if before != NO_OPENER and before not in known:
            self._gone[before] = None
            for oldest in list(self._gone)[:-GONE_MAX]:
                del self._gone[oldest]
        self._gone.pop(now, None)
        self._on_routers(self.routers, list(self._gone))
