"""How do bytes and wake-ups get from one worker's memory into another's?

The smallest interface that a hand-over needs. Backends: `nixl` (between processes) and `memory`
(in-process, with a seeded fault plan). One conformance suite, `tests/transfer`, runs on each.

Nothing here blocks for longer than one window's copy, nothing here starts a thread, and the caller
drives all progress by calling `poll` and `notices`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from services.rooms.ids import Incarnation


@dataclass(frozen=True, slots=True)
class Region:
    """A run of this process's memory that peers may write to or that puts are read from."""

    name: str
    """What it holds, the same word on every worker: "kv" or "slots"."""
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


@dataclass(frozen=True, slots=True)
class Run:
    """`length` bytes from offset `source` of my region to offset `target` of the peer's same-named one."""

    source: int
    target: int
    length: int


class PutState(Enum):
    PENDING = "pending"
    DONE = "done"
    """Every byte is visible at the peer."""
    FAILED = "failed"
    """The backend says the write has ended without reaching the peer. A write that may still land is
    PENDING, however long it takes."""


@dataclass(frozen=True, slots=True)
class PutId:
    """Names one posted write of this endpoint; never reused."""

    peer: Incarnation
    number: int


class TransferError(Exception):
    """A transfer call that cannot be carried out; nothing was posted."""


class UnknownPeer(TransferError):
    """No connection to that incarnation."""


class OutOfRegion(TransferError):
    """A run reaches outside the source or the target region."""


class Transfer(Protocol):
    """One process's endpoint."""

    def register(self, region: Region) -> None:
        """Make `region` known to the backend. Before the first `endpoint()`; once per name."""

    def endpoint(self) -> Endpoint:
        """What peers need in order to `connect` here."""

    def connect(self, peer: Endpoint) -> None:
        """Learn a peer. Idempotent per incarnation. Raises TransferError if it cannot be reached."""

    def connected(self, peer: Incarnation) -> bool: ...

    def put(self, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        """Post one one-sided write of `runs` to the peer's region of the same name.

        The caller keeps `runs` to one window (a few MB): some paths copy before they return. The
        source bytes must stay unchanged until `poll` says DONE or FAILED. No order holds between
        two puts; a put is posted only after the ones it must follow are DONE.
        """

    def poll(self, put: PutId) -> PutState:
        """Drive progress and tell how `put` stands. After DONE or FAILED was returned once, the put is
        forgotten and polling it again is a KeyError."""

    def pending(self, peer: Incarnation) -> int:
        """Puts to `peer` that have not been seen to end: 0 means quiet toward it."""

    def notify(self, peer: Incarnation, payload: bytes) -> None:
        """Wake the peer with a small message. It may be lost; it is never the truth."""

    def notices(self) -> list[tuple[str, bytes]]:
        """Drive progress and take the (agent, payload) pairs that arrived. Payloads are untrusted."""

    def disconnect(self, peer: Incarnation) -> None:
        """Forget a peer. Idempotent. Puts still pending toward it are abandoned, not stopped."""

    def close(self) -> None:
        """Release every handle, connection and registration. Idempotent."""
