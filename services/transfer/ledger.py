"""Which peers are known here, and which puts toward them have not been seen to end?

The bookkeeping that every backend shares, so that they cannot differ in it. A peer that is given up
while puts toward it are under way stays in the ledger, out of callers' sight, until the last one ends:
only then may the backend drop the connection, since a dropped connection tells nothing any more.

Pure: no backend, socket or clock; `forget` is called when a connection may be dropped.
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
"""What a backend keeps of a put under way."""


@dataclass(slots=True)
class PeerLink:
    endpoint: Endpoint
    regions: Mapping[str, Region]
    """The endpoint's, by name."""
    pending: int = 0
    leaving: bool = False
    broken: bool = False
    gone: bool = False
    """What it leads to exists no more, so that nothing can land there."""


@dataclass(slots=True)
class Ledger(Generic[Write]):
    incarnation: Incarnation
    agent: str
    forget: Callable[[Endpoint], None]
    _links: dict[Incarnation, PeerLink] = field(default_factory=dict)
    _writes: dict[PutId, Write] = field(default_factory=dict)
    _ends: dict[PutId, PutState] = field(default_factory=dict)
    """Of abandoned puts, until they are polled."""
    _posted: int = 0

    def lacks(self, peer: Endpoint) -> bool:
        """Whether `peer` is still to be connected. Raises TransferError if it cannot be as things stand."""
        if peer.incarnation == self.incarnation or peer.agent == self.agent:
            raise TransferError(f"endpoint {peer.agent}: incarnation or agent name is this process's own")
        link = self._links.get(peer.incarnation)
        if link is not None:
            return self._renews(link, peer)
        for other in self._links.values():
            if other.endpoint.agent == peer.agent:
                raise TransferError(
                    f"agent name {peer.agent} is held by incarnation {other.endpoint.incarnation:#x}, "
                    f"with {other.pending} puts under way: disconnect it first"
                )
        if len(self._links) >= PEERS_MAX:
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
        self._links[peer.incarnation] = PeerLink(peer, {region.name: region for region in peer.regions})

    def link(self, peer: Incarnation) -> PeerLink:
        """Raises UnknownPeer if it was never connected, or given up."""
        link = self._links.get(peer)
        if link is None or link.leaving:
            raise UnknownPeer(f"no connection to incarnation {peer:#x}")
        return link

    def usable(self, peer: Incarnation) -> bool:
        link = self._links.get(peer)
        return link is not None and not link.leaving and not link.broken

    def broke(self, peer: Incarnation) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.broken = True

    def unproven(self, peer: Incarnation) -> PutState:
        """How a put toward `peer` stands whose end the backend cannot tell."""
        link = self._links.get(peer)
        return PutState.FAILED if link is not None and link.gone else PutState.PENDING

    def post(self, peer: Incarnation, write: Write) -> PutId:
        self._posted += 1
        put = PutId(peer, self._posted)
        self._writes[put] = write
        self._links[peer].pending += 1
        return put

    def note_end(self, put: PutId) -> PutState | None:
        """How an abandoned put ended, once."""
        return self._ends.pop(put, None)

    def write(self, put: PutId) -> Write:
        """Raises KeyError if it has ended or never was."""
        return self._writes[put]

    def end(self, put: PutId) -> Write:
        """It has been seen to end."""
        write = self._writes.pop(put)
        link = self._links[put.peer]
        link.pending -= 1
        if link.leaving and link.pending == 0:
            self._drop(link)
        return write

    def end_abandoned(self, put: PutId, state: PutState) -> Write:
        """It has ended, and nobody asked: `note_end` will say it."""
        self._ends[put] = state
        while len(self._ends) > ABANDONED_ENDS_MAX:
            del self._ends[next(iter(self._ends))]
        return self.end(put)

    def abandoned(self) -> list[tuple[PutId, Write]]:
        """Puts under way toward peers that were given up."""
        leaving = {peer for peer, link in self._links.items() if link.leaving}
        return [(put, write) for put, write in self._writes.items() if put.peer in leaving] if leaving else []

    def known(self) -> list[Endpoint]:
        """Every peer whose connection the backend still holds."""
        return [link.endpoint for link in self._links.values()]

    def under_way(self) -> list[Write]:
        return list(self._writes.values())

    def pending(self, peer: Incarnation) -> int:
        link = self._links.get(peer)
        return 0 if link is None else link.pending

    def leave(self, peer: Incarnation, *, gone: bool = False) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        link.gone |= gone
        link.leaving = True
        if link.pending == 0:
            self._drop(link)

    def leave_all(self) -> None:
        """Nothing will be seen to end any more: what is under way stays under way."""
        for peer in list(self._links):
            self.leave(peer)

    def _drop(self, link: PeerLink) -> None:
        del self._links[link.endpoint.incarnation]
        self.forget(link.endpoint)
