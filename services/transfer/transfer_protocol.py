"""Protocol of a transfer backend, which writes one-sidedly into another worker's memory.

It is the smallest interface that a hand-over needs. Backends are `nixl` (between processes) and
`memory_transfer` (in one process, with injected faults, for tests). One conformance suite, `tests/transfer`,
runs on each.

No call blocks for longer than the copy of one window (a few MB), and none starts a thread. The caller drives
all progress by `poll` and `progress` on both sides, because some transports need the target's progress for a
write to land. One thread makes all calls of an endpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeAlias

from baton.ids import Incarnation
from baton.pages.transfer_plan import PageRun

ABANDONED_ENDS_MAX: Final = 4096
"""Most final states of abandoned puts (one-sided writes) that wait to be polled. The oldest are dropped
first. A put is abandoned if its peer was disconnected while it was under way."""

SLOTS: Final = "slots"
"""Name of the memory region that holds the metadata slots."""


def kv_region(group: int) -> str:
    """Return the name of the memory region that holds the pages of KV group `group`."""
    return f"kv{group}"


@dataclass(frozen=True, slots=True)
class Region:
    """A range of this process's memory that peers may write to, or that puts read from."""

    name: str
    """Region name, the same on every worker: SLOTS, or `kv_region` of a group."""
    address: int
    length: int
    """Length of the region in bytes."""
    device: str = "cpu"
    """Device that holds the memory: "cpu" or "cuda:N"."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Everything that a peer needs to write into this process's memory.

    It is plain data, which travels over gRPC and is never pickled.
    """

    incarnation: Incarnation
    agent: str
    metadata: bytes
    """Connection data of the backend (NIXL's agent metadata), which only a backend of the same
    kind can read."""
    regions: tuple[Region, ...]


Run: TypeAlias = PageRun
"""One byte range of a put (one-sided write): (source, target, length). Source and target are byte offsets in
this process's region and in the peer's region of the same name."""


class PutState(Enum):
    PENDING = "pending"
    DONE = "done"
    """Every byte of the write is visible at the peer."""
    FAILED = "failed"
    """The write has ended without reaching the peer. A write that may still land is PENDING, however long it
    takes."""


class PutId(NamedTuple):
    """Id of one put (a posted one-sided write) of this endpoint. It is never reused."""

    peer: Incarnation
    number: int


class TransferError(Exception):
    """A transfer call cannot be carried out. Nothing was posted."""


class UnknownPeer(TransferError):
    """This endpoint has no connection to the given incarnation of a peer."""


class PutsUnended(TransferError):
    """The connection to this incarnation of a peer broke, and one-sided writes to it are not known to have
    ended."""


class OutOfRegion(TransferError):
    """A byte range of a put (one-sided write) reaches outside the source or the target region."""


class Transfer(Protocol):
    """Transfer endpoint of one process: it registers memory, connects to peers and writes into
    their memory."""

    def register(self, region: Region) -> None:
        """Register a region of memory with the backend, before the first `endpoint()` and once per name.

        The memory stays mapped until `close`. Raises TransferError.
        """

    def endpoint(self) -> Endpoint:
        """Return the data that peers need for `connect`. It does not change after the first call."""

    def connect(self, peer: Endpoint) -> None:
        """Connect to a peer. Idempotent per incarnation. Only the sender of puts needs a connection.

        Raises TransferError if the peer cannot be reached, if its endpoint is invalid, or if another
        incarnation still uses its agent name: `disconnect` that one first. A broken connection is made anew
        when no put is pending on it, and until then raises PutsUnended.
        """

    def connected(self, peer: Incarnation) -> bool:
        """Return whether the peer is connected: not disconnected since, and the connection not seen to break.

        It does not use the network, so True is no proof that the peer lives.
        """

    def put(self, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        """Post a one-sided write (a put) of `runs` from this process's region to the peer's region of that
        name.

        The caller limits `runs` to one window (a few MB), because some transports copy before they return.
        The source must not change until `poll` returns DONE or FAILED. Two puts have no order: post a put
        after those that it must follow are DONE.

        Raises UnknownPeer if there is no connection. Raises OutOfRegion if a run is empty or leaves its
        region, which is a bug of the caller's plan. Raises TransferError for an unknown region, no runs or a
        broken connection. After an error nothing was posted.
        """

    def poll(self, put: PutId) -> PutState:
        """Drive progress and return the state of `put`, a one-sided write that was posted.

        After DONE or FAILED was returned once, the put is forgotten, and another poll raises KeyError.
        Nothing that a peer does makes this raise: a peer that died yields FAILED.
        """

    def pending(self, peer: Incarnation) -> int:
        """Return the number of puts (one-sided writes) to `peer` that are not known to have ended.

        At 0 no write to the peer is under way. The number remains correct after `disconnect`. After `close`
        it never falls any more.
        """

    def progress(self) -> None:
        """Drive the progress of outgoing and incoming writes. Also check whether puts to disconnected peers
        have ended."""

    def disconnect(self, peer: Incarnation, *, gone: bool = False) -> None:
        """Disconnect from a peer. Idempotent.

        Pending puts to it are abandoned, not stopped. They may still land, and their source must not change.
        `poll` still returns how they ended, for the last ABANDONED_ENDS_MAX of them. `progress` checks them,
        too, so `pending` falls to 0 without polls.

        `gone`: whether the peer or its memory no longer exists. A put without a known end then counts as
        FAILED.
        """

    def close(self) -> None:
        """Release every handle, connection and registration. Idempotent.

        Pending puts may yet land, and `poll` returns PENDING for them from then on. After `close` all calls
        but `pending`, `connected`, `disconnect`, `close` and a `poll` of a pending put raise TransferError.
        """
