"""How does this rank reach the memory of each decode worker?

A way leads to one exposure: when a decode worker takes its memory back from its senders, it exposes it anew
under another name, and whatever was to be written by the old way fails.
"""

from dataclasses import dataclass

from services.pages.checksum import KvChecksum
from services.pages.errors import LayoutMismatch
from services.pages.layout import KvLayout
from services.pages.plan import TransferPlan, plan_transfer
from services.pages.record import SCHEMA_HASH
from services.rooms.errors import WorkerRefused
from services.rooms.ids import Incarnation
from services.transfer.bounds import check_endpoint
from services.transfer.interface import Endpoint, Region, Transfer, TransferError
from services.wire.baton.v1 import inference_pb2
from services.wire.conversions import Malformed, checksum_from_wire, layout_from_wire
from services.wire.errors import NotConnected


@dataclass(frozen=True, slots=True)
class Way:
    exposure: Incarnation
    """Of rank 0's endpoint: what grants name, the same on every rank."""
    peer: Incarnation
    """Of the endpoint that this rank writes to."""
    plan: TransferPlan


class Ways:
    """One per decode worker, by its incarnation. Forgotten with it."""

    def __init__(
        self,
        transfer: Transfer,
        layout: KvLayout,
        rank: int = 0,
        ranks: int = 1,
        checksum: KvChecksum = KvChecksum.RECORD,
    ) -> None:
        self._transfer = transfer
        self._layout = layout
        self._rank = rank
        self._ranks = ranks
        self._checksum = checksum
        self._ways: dict[Incarnation, Way] = {}

    def __len__(self) -> int:
        return len(self._ways)

    def connect(self, wire: inference_pb2.ConnectRequest) -> None:
        """Make a decode worker's memory known here. Where another exposure of it was known, that one is
        forgotten: writes to it fail.

        Raises WorkerRefused and LayoutMismatch by the differing field, Malformed, and NotConnected when its
        memory cannot be reached (now)."""
        if wire.schema != SCHEMA_HASH:
            raise WorkerRefused("schema", SCHEMA_HASH, wire.schema)
        theirs = checksum_from_wire(wire.kv_checksum)
        if theirs is not self._checksum:
            raise WorkerRefused("kv_checksum", self._checksum.value, theirs.value)
        if len(wire.endpoints) != self._ranks:
            raise LayoutMismatch("ranks", self._ranks, len(wire.endpoints))
        plan = plan_transfer(self._layout, layout_from_wire(wire.layout))
        receiver, endpoint = Incarnation(wire.receiver), endpoint_from_wire(wire.endpoints[self._rank])
        if not (receiver and all(each.incarnation for each in wire.endpoints)):
            raise Malformed("a receiver and each of its endpoints need an incarnation")
        self._check(endpoint, receiver)
        before = self._ways.get(receiver)
        if before is not None and before.peer != endpoint.incarnation:
            self.forget(receiver)
        try:
            self._transfer.connect(endpoint)
        except TransferError as error:
            raise NotConnected(f"cannot reach the decode worker's memory: {error}") from error
        self._ways[receiver] = Way(Incarnation(wire.endpoints[0].incarnation), endpoint.incarnation, plan)

    def _check(self, endpoint: Endpoint, receiver: Incarnation) -> None:
        """Before anything is forgotten for it: nonsense takes no way from anyone. Raises Malformed."""
        try:
            check_endpoint(endpoint)
        except TransferError as error:
            raise Malformed(str(error)) from error
        if any(way.peer == endpoint.incarnation for whose, way in self._ways.items() if whose != receiver):
            raise Malformed(f"endpoint {endpoint.agent}: it is another receiver's")

    def granted(self, receiver: Incarnation, exposure: Incarnation) -> Way:
        """The way to the memory that a grant names. Raises NotConnected if there is none that holds."""
        way = self._ways.get(receiver)
        if way is None or way.exposure != exposure or not self._transfer.connected(way.peer):
            raise NotConnected(f"receiver {receiver:#x}, exposure {exposure:#x}: connect first")
        return way

    def forget(self, receiver: Incarnation) -> None:
        """Nothing is written there any more; what is under way may still land. Idempotent."""
        way = self._ways.pop(receiver, None)
        if way is not None:
            self._transfer.disconnect(way.peer)


def endpoint_from_wire(wire: inference_pb2.Endpoint) -> Endpoint:
    regions = tuple(Region(each.name, each.address, each.length, each.device) for each in wire.regions)
    return Endpoint(Incarnation(wire.incarnation), wire.agent, wire.metadata, regions)
