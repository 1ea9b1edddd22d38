"""How do bytes get from one worker's memory into another's?

The smallest interface that a hand-over needs. Backends: `nixl` (between processes) and `memory`
(in-process, with a seeded fault plan). One conformance suite, `tests/transfer`, runs on each.

Nothing here blocks for longer than one window's copy, nothing here starts a thread, and the caller
drives all progress by calling `poll` and `progress`, on both sides: some paths need the target's progress
for a write to land. One thread makes all calls of an endpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeAlias

from baton.ids import Incarnation
from baton.pages.transfer_plan import PageRun

ABANDONED_ENDS_MAX: Final = 4096
"""Ends of abandoned puts that are kept until they are polled; the oldest go first."""

SLOTS: Final = "slots"
"""The region of the metadata slots."""


def kv_region(group: int) -> str:
    """The name of the region in which a layout's group has its pages."""
    return f"kv{group}"


@dataclass(frozen=True, slots=True)
class Region:
    """A run of this process's memory that peers may write to or that puts are read from."""

    name: str
    """What it holds, the same word on every worker: SLOTS, or `kv_region` of a group."""
    address: int
    length: int
    """Bytes."""
    device: str = "cpu"
    """"cpu" or "cuda:N"."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Everything a peer needs to reach this process. Plain data: it travels over gRPC, never pickled."""

    incarnation: Incarnation
    agent: str
    metadata: bytes
    """Opaque to everyone but the backend of the same kind."""
    regions: tuple[Region, ...]


Run: TypeAlias = PageRun
"""(source, target, length): from an offset of my region to one of the peer's same-named one, in bytes."""


class PutState(Enum):
    PENDING = "pending"
    DONE = "done"
    """Every byte is visible at the peer."""
    FAILED = "failed"
    """The backend says the write has ended without reaching the peer. A write that may still land is
    PENDING, however long it takes."""


class PutId(NamedTuple):
    """Names one posted write of this endpoint; never reused."""

    peer: Incarnation
    number: int


class TransferError(Exception):
    """A transfer call that cannot be carried out; nothing was posted."""


class UnknownPeer(TransferError):
    """No connection to that incarnation."""


class PutsUnended(TransferError):
    """The connection to that incarnation broke, and puts toward it have not been seen to end (yet)."""


class OutOfRegion(TransferError):
    """A run reaches outside the source or the target region."""


class Transfer(Protocol):
    """One process's endpoint."""

    def register(self, region: Region) -> None:
        """Make `region` known to the backend. Before the first `endpoint()`; once per name. The memory
        stays mapped until `close`. Raises TransferError."""

    def endpoint(self) -> Endpoint:
        """What peers need in order to `connect` here. From the first call on it does not change."""

    def connect(self, peer: Endpoint) -> None:
        """Learn a peer. Idempotent per incarnation. One way is enough to put.

        Raises TransferError if it cannot be reached, if the endpoint makes no sense, or if its agent
        name is still held by another incarnation: `disconnect` that one first. A connection that broke
        is made anew once nothing is pending on it; PutsUnended until then.
        """

    def connected(self, peer: Incarnation) -> bool:
        """The peer was connected, and its connection has neither been given up nor been seen to break.
        Never asks the network: True does not say that the peer lives."""

    def put(self, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        """Post one one-sided write of `runs` to the peer's region of the same name.

        The caller keeps `runs` to one window (a few MB): some paths copy before they return. The
        source bytes must stay unchanged until `poll` says DONE or FAILED. No order holds between
        two puts; a put is posted only after the ones it must follow are DONE.

        Raises UnknownPeer, OutOfRegion (a run of no bytes included: it is a plan gone wrong) and
        TransferError (no such region, no runs, a broken connection); then nothing was posted.
        """

    def poll(self, put: PutId) -> PutState:
        """Drive progress and tell how `put` stands. After DONE or FAILED was returned once, the put is
        forgotten and polling it again is a KeyError. Never raises for what the peer does: a peer that
        died shows as FAILED."""

    def pending(self, peer: Incarnation) -> int:
        """Puts to `peer` that have not been seen to end: 0 means quiet toward it. Stays true after
        `disconnect`; after `close` it never falls any more, since nothing is seen to end."""

    def progress(self) -> None:
        """Let writes of either side go on, and see the ends of abandoned puts."""

    def disconnect(self, peer: Incarnation, *, gone: bool = False) -> None:
        """Forget a peer. Idempotent. Puts still pending toward it are abandoned, not stopped: they may
        land, their source stays pinned, `poll` still tells their end, and `progress` watches for it too,
        so that `pending` falls to 0 without polling them. (The ends of the last ABANDONED_ENDS_MAX such
        puts are kept for `poll`.) `gone`: the peer, or its memory, is known to exist no more, so that a put
        whose end the backend cannot tell, now or later, has FAILED."""

    def close(self) -> None:
        """Release every handle, connection and registration. Idempotent. Puts still pending may yet
        land: `poll` says PENDING for ever. Every other call but `pending`, `connected`, `disconnect` and
        `close` raises TransferError."""
