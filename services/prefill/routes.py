"""Routes from this prefill rank to the memory of each decode worker's ranks.

A route leads to one exposure. A decode worker that takes its memory back exposes it anew under other ids, and
writes by the old route fail.
"""

from collections.abc import Sequence

from baton.handover.route import Route, Target
from baton.ids import Incarnation
from baton.pages.kv_checksum import KvChecksum
from baton.pages.layout import KvLayout
from baton.pages.record import SCHEMA_HASH
from baton.pages.transfer_plan import HandoverPlan, plan_hand_over
from baton.rooms.errors import NotConnected, WorkerRefused
from baton.transfer.bounds import check_endpoint
from baton.transfer.transfer_protocol import Endpoint, PutsUnended, Region, Transfer, TransferError
from baton.wire.baton.v1 import inference_pb2
from baton.wire.conversions import Malformed
from baton.wire.errors import NotQuiet
from baton.wire.layout_messages import checksum_from_wire, layout_from_wire


class Routes:
    """Routes to the memory of decode workers: one for each connected decode worker, by its incarnation."""

    def __init__(
        self,
        transfer: Transfer,
        layouts: Sequence[KvLayout],
        rank: int = 0,
        checksum: KvChecksum = KvChecksum.RECORD,
    ) -> None:
        """Start without routes. `layouts`: KV layouts of all ranks of this worker, in rank order."""
        self._transfer = transfer
        self._layouts = tuple(layouts)
        self._rank = rank
        self._checksum = checksum
        self._routes: dict[Incarnation, Route] = {}

    def __len__(self) -> int:
        return len(self._routes)

    @property
    def elected(self) -> bool:
        """Whether this rank writes the records and the seals of its worker (`one-writer`)."""
        return self._rank == 0

    def connect(self, wire: inference_pb2.ConnectRequest) -> None:
        """Connect to a decode worker's exposed memory. If there is a route to an earlier exposure, the new
        one replaces it, and writes by the old one fail.

        Raises WorkerRefused and LayoutMismatch, which name the differing field, and Malformed: the same on
        every rank. Raises NotConnected if this rank cannot reach the memory now, or if the exposure is
        outdated. Raises NotQuiet if only unfinished writes prevent the connection.
        """
        if wire.schema != SCHEMA_HASH:
            raise WorkerRefused("schema", SCHEMA_HASH, wire.schema)
        theirs = checksum_from_wire(wire.kv_checksum)
        if theirs is not self._checksum:
            raise WorkerRefused("kv_checksum", self._checksum.value, theirs.value)
        layouts = [layout_from_wire(each) for each in wire.layouts]
        if not layouts or len(layouts) != len(wire.endpoints):
            raise Malformed(f"{len(wire.endpoints)} endpoints and {len(layouts)} layouts: one of each a rank")
        plan = plan_hand_over(self._layouts, layouts)
        receiver = Incarnation(wire.receiver)
        endpoints = [endpoint_from_wire(each) for each in wire.endpoints]
        self._check(receiver, endpoints)
        route = self._route(plan, layouts, endpoints)
        reached = {target.peer for target in route.targets}
        before = self._routes.get(receiver)
        if before is not None and route.exposure < before.exposure:
            raise NotConnected(
                f"receiver {receiver:#x}: exposure {route.exposure:#x} is older than {before.exposure:#x}"
            )
        known = {target.peer for target in before.targets} if before else set()
        if before is not None and before.endpoints != route.endpoints:
            self.forget(receiver, gone=before.revoked_by(route.exposure))
            known = set()
        made: list[Incarnation] = []
        for endpoint in endpoints:
            if endpoint.incarnation not in reached:
                continue
            try:
                self._transfer.connect(endpoint)
            except TransferError as error:
                for peer in made:
                    self._transfer.disconnect(peer)
                kind = NotQuiet if isinstance(error, PutsUnended) else NotConnected
                raise kind(f"cannot reach the decode worker's memory: {error}") from error
            if endpoint.incarnation not in known:
                made.append(endpoint.incarnation)
        self._routes[receiver] = route

    def _check(self, receiver: Incarnation, endpoints: Sequence[Endpoint]) -> None:
        """Check the endpoints of a decode worker before an older route is dropped for them. Raises
        Malformed."""
        named = {each.incarnation for each in endpoints}
        if not receiver or 0 in named or len(named) != len(endpoints):
            raise Malformed("a receiver and each of its endpoints need an incarnation of their own")
        for endpoint in endpoints:
            try:
                check_endpoint(endpoint)
            except TransferError as error:
                raise Malformed(str(error)) from error
        for whose, route in self._routes.items():
            if whose != receiver and route.endpoints & named:
                raise Malformed(f"receiver {receiver:#x}: one of its endpoints is another receiver's")

    def _route(self, plan: HandoverPlan, layouts: Sequence[KvLayout], endpoints: Sequence[Endpoint]) -> Route:
        plans = [plan.between(self._rank, each) for each in range(len(endpoints))]
        targets = tuple(
            Target(endpoint.incarnation, each, layout.heads)
            for endpoint, each, layout in zip(endpoints, plans, layouts, strict=True)
            if self.elected or not each.empty
        )
        named = frozenset(each.incarnation for each in endpoints)
        return Route(endpoints[0].incarnation, layouts[0].page_tokens, targets, named)

    def granted(self, receiver: Incarnation, exposure: Incarnation) -> Route:
        """Return the route to the memory that a grant names. Raises NotConnected if this worker is not
        connected to it."""
        route = self._routes.get(receiver)
        if (
            route is None
            or route.exposure != exposure
            or not all(self._transfer.connected(target.peer) for target in route.targets)
        ):
            raise NotConnected(f"receiver {receiver:#x}, exposure {exposure:#x}: connect first")
        return route

    def forget(self, receiver: Incarnation, *, gone: bool) -> None:
        """Forget the route to a decode worker. Idempotent.

        `gone`: whether the worker's memory no longer exists. If it does, writes under way may still land in
        it.
        """
        route = self._routes.pop(receiver, None)
        if route is not None:
            for target in route.targets:
                self._transfer.disconnect(target.peer, gone=gone)


def endpoint_from_wire(wire: inference_pb2.Endpoint) -> Endpoint:
    regions = tuple(Region(each.name, each.address, each.length, each.device) for each in wire.regions)
    return Endpoint(Incarnation(wire.incarnation), wire.agent, wire.metadata, regions)
