"""Ledger of connected peers, and of puts (one-sided writes) to them whose end is not known.

All backends share this bookkeeping, so that they cannot differ in it. A peer may be disconnected while puts
to it are under way. It then stays in the ledger, invisible to callers, until the last of these puts has
ended. Only then may the backend drop the connection, because a dropped connection no longer reports the ends
of puts. The ledger is pure: it has no backend, socket or clock. It calls `forget` when a connection may be
dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from baton.ids import Incarnation
from baton.transfer.transfer_protocol import (
    ABANDONED_ENDS_MAX,
    Endpoint,
    PutId,
    PutState,
    PutsUnended,
    Region,
    TransferError,
    UnknownPeer,
)

PEERS_MAX: Final = 1024

Write = TypeVar("Write")
"""Type variable: the object in which a transfer backend records one put (one-sided write) that is under way.
"""


@dataclass(slots=True)
class PeerLink:
    endpoint: Endpoint
    regions: Mapping[str, Region]
    """Memory regions of the peer to which puts may write, by region name."""
    pending: int = 0
    leaving: bool = False
    broken: bool = False
    gone: bool = False
    """Whether the peer or its memory no longer exists, so that no write (put) to it can land any more."""


@dataclass(slots=True)
class Ledger(Generic[Write]):
    incarnation: Incarnation
    agent: str
    forget: Callable[[Endpoint], None]
    links: dict[Incarnation, PeerLink] = field(default_factory=dict)
    _writes: dict[PutId, Write] = field(default_factory=dict)
    _ends: dict[PutId, PutState] = field(default_factory=dict)
    """Final states of abandoned puts that were not polled since. A put (one-sided write) is abandoned if its
    peer was disconnected while it was under way."""
    _posted: int = 0

    def lacks(self, peer: Endpoint) -> bool:
        """Return whether the backend has to make a connection to `peer`. Raises TransferError if it must not
        make one now."""
        if peer.incarnation == self.incarnation or peer.agent == self.agent:
            raise TransferError(f"endpoint {peer.agent}: incarnation or agent name is this process's own")
        link = self.links.get(peer.incarnation)
        if link is not None:
            return self._renews(link, peer)
        for other in self.links.values():
            if other.endpoint.agent == peer.agent:
                raise TransferError(
                    f"agent name {peer.agent} is held by incarnation {other.endpoint.incarnation:#x}, "
                    f"with {other.pending} puts under way: disconnect it first"
                )
        if len(self.links) >= PEERS_MAX:
            raise TransferError(f"{PEERS_MAX} peers are connected already")
        return True

    def _renews(self, link: PeerLink, peer: Endpoint) -> bool:
        if link.endpoint != peer:
            raise TransferError(f"endpoint {peer.agent}: differs from the one its incarnation had before")
        if not link.broken:
            link.leaving = False
            return False
        if link.pending:
            raise PutsUnended(
                f"the connection to {peer.agent} broke, and {link.pending} puts have not ended yet"
            )
        self._drop(link)
        return True

    def add(self, peer: Endpoint) -> None:
        self.links[peer.incarnation] = PeerLink(peer, {region.name: region for region in peer.regions})

    def link(self, peer: Incarnation) -> PeerLink:
        """Return the link to a connected peer. Raises UnknownPeer if it was never connected, or was
        disconnected."""
        link = self.links.get(peer)
        if link is None or link.leaving:
            raise UnknownPeer(f"no connection to incarnation {peer:#x}")
        return link

    def usable(self, peer: Incarnation) -> bool:
        link = self.links.get(peer)
        return link is not None and not link.leaving and not link.broken

    def broke(self, peer: Incarnation) -> None:
        link = self.links.get(peer)
        if link is not None:
            link.broken = True

    def unproven(self, peer: Incarnation) -> PutState:
        """Return the state of a put (one-sided write) to `peer` if the backend cannot know whether it ended.

        FAILED if the peer or its memory no longer exists, else PENDING.
        """
        link = self.links.get(peer)
        return PutState.FAILED if link is not None and link.gone else PutState.PENDING

    def post(self, peer: Incarnation, write: Write) -> PutId:
        self._posted += 1
        put = PutId(peer, self._posted)
        self._writes[put] = write
        self.links[peer].pending += 1
        return put

    def note_end(self, put: PutId) -> PutState | None:
        """Return the final state of an abandoned put (one-sided write), and remove it from the ledger.

        None if the put has not ended, or at a second call.
        """
        return self._ends.pop(put, None)

    def write(self, put: PutId) -> Write:
        """Return the backend's record of a put that is under way. Raises KeyError if the put has ended or
        never existed."""
        return self._writes[put]

    def end(self, put: PutId) -> Write:
        """Remove a put (one-sided write) that has ended from the ledger, and return the backend's record of
        it."""
        write = self._writes.pop(put)
        link = self.links[put.peer]
        link.pending -= 1
        if link.leaving and link.pending == 0:
            self._drop(link)
        return write

    def end_abandoned(self, put: PutId, state: PutState) -> Write:
        """Remove an abandoned put (one-sided write) that has ended in `state`. `note_end` will return that
        state."""
        self._ends[put] = state
        while len(self._ends) > ABANDONED_ENDS_MAX:
            del self._ends[next(iter(self._ends))]
        return self.end(put)

    def abandoned(self) -> list[tuple[PutId, Write]]:
        """Return the puts (one-sided writes) that are still under way to disconnected peers, as pairs of id
        and backend's record."""
        leaving = {peer for peer, link in self.links.items() if link.leaving}
        return [(put, write) for put, write in self._writes.items() if put.peer in leaving] if leaving else []

    def known(self) -> list[Endpoint]:
        """Return the endpoint of each peer to which the backend still has a connection, disconnected ones
        with puts under way included."""
        return [link.endpoint for link in self.links.values()]

    def under_way(self) -> list[Write]:
        return list(self._writes.values())

    def pending(self, peer: Incarnation) -> int:
        link = self.links.get(peer)
        return 0 if link is None else link.pending

    def leave(self, peer: Incarnation, *, gone: bool = False) -> None:
        link = self.links.get(peer)
        if link is None:
            return
        link.gone |= gone
        link.leaving = True
        if link.pending == 0:
            self._drop(link)

    def leave_all(self) -> None:
        """Disconnect all peers when the backend closes. Puts (one-sided writes) under way count as pending
        from then on."""
        for peer in list(self.links):
            self.leave(peer)

    def _drop(self, link: PeerLink) -> None:
        del self.links[link.endpoint.incarnation]
        self.forget(link.endpoint)
