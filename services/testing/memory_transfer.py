"""Transfer backend between the endpoints of one process, for tests and simulations.

It has the same interface, bookkeeping and results as the backend between processes. The network underneath is
a `MemoryFabric`, which decides by its fault plan when bytes land.
"""

from collections.abc import Sequence
from typing import Final

from baton.ids import Incarnation
from baton.testing.memory_fabric import MemoryFabric, Write
from baton.transfer.bounds import check_endpoint, check_region, check_runs, region_named
from baton.transfer.ledger import Ledger
from baton.transfer.transfer_protocol import Endpoint, PutId, PutState, Region, Run, TransferError

METADATA: Final = b"memory"


class MemoryTransfer:
    """Transfer endpoint within one process (`baton.transfer.transfer_protocol.Transfer`), for tests.

    Regions are real addresses, which stay mapped until this endpoint's `close` or the fabric's `kill` of its
    incarnation.
    """

    def __init__(self, fabric: MemoryFabric, incarnation: Incarnation, agent_name: str | None = None) -> None:
        self._fabric = fabric
        self._name = agent_name or f"memory-{incarnation:016x}"
        self.ledger: Ledger[Write] = Ledger(incarnation, self._name, lambda _: None)
        self._regions: dict[str, Region] = {}
        self._endpoint: Endpoint | None = None
        self._closed = False

    def register(self, region: Region) -> None:
        self._check_open()
        check_region(region)
        if region.device != "cpu":
            raise TransferError(f"region {region.name!r}: device {region.device} is not main memory")
        if region.name in self._regions:
            raise TransferError(f"region {region.name!r} is registered already")
        if self._endpoint is not None:
            raise TransferError(f"region {region.name!r} comes after the first endpoint()")
        self._regions[region.name] = region

    def endpoint(self) -> Endpoint:
        self._check_open()
        if self._endpoint is None:
            endpoint = Endpoint(self.ledger.incarnation, self._name, METADATA, tuple(self._regions.values()))
            self._fabric.attach(endpoint)
            self._endpoint = endpoint
        return self._endpoint

    def connect(self, peer: Endpoint) -> None:
        self._check_open()
        check_endpoint(peer)
        if peer.metadata != METADATA:
            raise TransferError(f"endpoint {peer.agent}: its metadata is damaged, or not memory's")
        if not self.ledger.lacks(peer):
            return
        if not self._fabric.reaches(peer):
            raise TransferError(f"endpoint {peer.agent} cannot be reached")
        self.ledger.add(peer)

    def connected(self, peer: Incarnation) -> bool:
        return self.ledger.usable(peer)

    def put(self, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        self._check_open()
        link = self.ledger.link(peer)
        source = region_named(region, self._regions, "this process")
        target = region_named(region, link.regions, f"peer {link.endpoint.agent}")
        check_runs(runs, source, target)
        if link.broken:
            raise TransferError(f"the connection to {link.endpoint.agent} broke")
        write = self._fabric.post(self.ledger.incarnation, peer, source, target, runs)
        return self.ledger.post(peer, write)

    def poll(self, put: PutId) -> PutState:
        ended = self.ledger.note_end(put)
        if ended is not None:
            return ended
        write = self.ledger.write(put)
        state = self._state(put, write)
        if state is not PutState.PENDING:
            self.ledger.end(put)
        return state

    def _state(self, put: PutId, write: Write) -> PutState:
        if self._closed:
            return PutState.PENDING
        self._fabric.step()
        if write.state is PutState.FAILED:
            self.ledger.broke(put.peer)
        return write.state

    def pending(self, peer: Incarnation) -> int:
        return self.ledger.pending(peer)

    def progress(self) -> None:
        self._check_open()
        self._fabric.step()
        for put, write in self.ledger.abandoned():
            if write.state is not PutState.PENDING:
                self.ledger.end_abandoned(put, write.state)

    def disconnect(self, peer: Incarnation, *, gone: bool = False) -> None:
        self.ledger.leave(peer, gone=gone)  # nothing else changes, since every end is known here

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.ledger.leave_all()
        self._fabric.detach(self.ledger.incarnation)

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("this endpoint is closed")
