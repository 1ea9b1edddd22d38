"""Protocol of a transfer backend: one-sided writes into another worker's memory.

It is the smallest interface that a hand-over needs. Backends are `nixl` (between processes) and `memory`
(in-process, with a seeded fault plan). One conformance suite, `tests/transfer`, runs on each.

Nothing here blocks for longer than one window's copy, and nothing here starts a thread. The caller drives
all progress by `poll` and `progress` on both sides, because some transports need the target's progress for
a write to land. One thread makes all calls of an endpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeAlias

from baton.ids import Incarnation
from baton.pages.transfer_plan import PageRun

ABANDONED_ENDS_MAX: Final = 4096
"""Most ends of abandoned puts that wait to be polled. The oldest are dropped first."""

SLOTS: Final = "slots"
"""Name of the region of the metadata slots."""


def kv_region(group: int) -> str:
    """Return the name of the region of a KV group's pages."""
    return f"kv{group}"


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process that peers may write to, or that puts are read from."""

    name: str
    """Name, the same on every worker: SLOTS, or `kv_region` of a group."""
    address: int
    length: int
    """Length in bytes."""
    device: str = "cpu"
    """"cpu" or "cuda:N"."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Everything a peer needs to reach this process. Plain data: it travels over gRPC, never pickled."""

    incarnation: Incarnation
    agent: str
    metadata: bytes
    """Data for a backend of the same kind, opaque to all others."""
    regions: tuple[Region, ...]


Run: TypeAlias = PageRun
"""(source, target, length) in bytes: offsets in this region and in the peer's region of the same name."""


class PutState(Enum):
    PENDING = "pending"
    DONE = "done"
    """Every byte is visible at the peer."""
    FAILED = "failed"
    """The write has ended without reaching the peer. A write that may still land is PENDING, however long
    it takes."""


class PutId(NamedTuple):
    """Names one posted write of this endpoint; never reused."""

    peer: Incarnation
    number: int


class TransferError(Exception):
    """A transfer call that cannot be carried out; nothing was posted."""


class UnknownPeer(TransferError):
    """There is no connection to that incarnation."""


class PutsUnended(TransferError):
    """The connection to that incarnation broke, and puts toward it are not known to have ended."""


class OutOfRegion(TransferError):
    """A run reaches outside the source or the target region."""


class Transfer(Protocol):
    """Endpoint of one process."""

    def register(self, region: Region) -> None:
        """Register `region` with the backend, before the first `endpoint()` and once per name.

        The memory stays mapped until `close`. Raises TransferError.
        """

    def endpoint(self) -> Endpoint:
        """Return the data that peers need for `connect`. It does not change after the first call."""

    def connect(self, peer: Endpoint) -> None:
        """Connect to a peer. Idempotent per incarnation. Puts need the connection of the sender only.

        Raises TransferError if the peer cannot be reached, if its endpoint is invalid, or if another
        incarnation still uses its agent name: `disconnect` that one first. A broken connection is made anew
        when no put is pending on it, and until then raises PutsUnended.
        """

    def connected(self, peer: Incarnation) -> bool:
        """Return whether the peer was connected, and its connection neither given up nor seen to break.

        It does not use the network: True is no proof that the peer lives.
        """

    def put(self, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        """Post one one-sided write of `runs` to the peer's region of the same name.

        The caller limits `runs` to one window (a few MB), because some transports copy before they return.
        The source must not change until `poll` returns DONE or FAILED. Two puts have no order: post a put
        after those that it must follow are DONE.

        Raises UnknownPeer, OutOfRegion (also for an empty run, which is an error of the plan) and
        TransferError (no such region, no runs, a broken connection). Nothing was posted then.
        """

    def poll(self, put: PutId) -> PutState:
        """Drive progress and return the state of `put`.

        After DONE or FAILED was returned once, the put is forgotten, and another poll raises KeyError. The
        acts of a peer never raise: a peer that died yields FAILED.
        """

    def pending(self, peer: Incarnation) -> int:
        """Return the number of puts to `peer` whose end is not known. 0 means quiet.

        It remains correct after `disconnect`. After `close` it never falls any more.
        """

    def progress(self) -> None:
        """Drive the writes of either side, and look for the ends of abandoned puts."""

    def disconnect(self, peer: Incarnation, *, gone: bool = False) -> None:
        """Forget a peer. Idempotent.

        Pending puts toward it are abandoned, not stopped. They may land, and their source must not change.
        `poll` still returns their end, for the last ABANDONED_ENDS_MAX of them. `progress` looks for it,
        too, so that `pending` falls to 0 without polls. `gone`: the peer or its memory no longer exists, so
        that a put with an unknowable end has FAILED.
        """

    def close(self) -> None:
        """Release every handle, connection and registration. Idempotent.

        Pending puts may yet land, and `poll` returns PENDING for them for ever. All calls but `pending`,
        `connected`, `disconnect` and `close` raise TransferError.
        """
