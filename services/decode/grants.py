"""What are senders told of this worker's memory, and when?

Where it lies: every rank tells the others, once and again when it was moved, and the leader's peers connect
with what all have told. Where one room may write: its grant, which leaves when every rank has exposed what it
names.
"""

from collections.abc import Sequence

from services.decode.job import Job
from services.decode.peers import Peers, endpoint_to_wire
from services.ids import Generation, Incarnation
from services.pages.holdings import Holdings
from services.pages.layout import KvLayout
from services.rooms.plurals import counted
from services.rooms.timeline import Moment
from services.transfer.exposure import Exposure
from services.wire.baton.v1 import inference_pb2, rooms_pb2
from services.worker.metrics import WorkerMetrics
from services.worker.reporter import Reporter


class Grants:
    def __init__(
        self,
        incarnation: Incarnation,
        holdings: Holdings,
        layout: KvLayout,
        exposure: Exposure,
        peers: Peers,
        reporter: Reporter,
        metrics: WorkerMetrics,
    ) -> None:
        self._incarnation = incarnation
        self._holdings = holdings
        self._layout = layout
        self._exposure = exposure
        self._peers = peers
        self._reporter = reporter
        self._metrics = metrics
        self._granting: list[tuple[rooms_pb2.Peer, inference_pb2.GrantRequest]] = []
        """Exposed here, and not yet known to be so on every rank."""
        self._untold = True
        """The other ranks do not know yet where this one's memory is."""
        self.endpoints: Sequence[inference_pb2.Endpoint] = ()
        """Of every rank, in rank order, once they have told."""

    def told(self) -> bytes | None:
        """Where this rank's memory is, for the others, if they do not know yet."""
        if not self._untold:
            return None
        self._untold = False
        return endpoint_to_wire(self._exposure.endpoint()).SerializeToString()

    def hear(self, told: Sequence[bytes]) -> None:
        self.endpoints = [inference_pb2.Endpoint.FromString(each) for each in told]
        self._peers.exposed_anew(self.endpoints)

    def moved(self) -> None:
        """This rank's memory is elsewhere now, as every other's is."""
        self._untold = True

    def grant(self, job: Job) -> None:
        """Reserve, expose, and only then tell: what is named to a peer is already marked exposed, on every
        rank (`exposure-on-page`). A slot that a late rank blanked after it was written would never be seen
        sealed."""
        receiver = job.receiver
        holding = self._holdings.take(receiver.id, receiver.pages_needed, job.given, job.request.salt)
        receiver.expose(Generation(holding.slot.generation), holding.shared)
        self._holdings.expose(receiver.id, receiver.pages_expected)
        job.lay(holding.pages)
        prefix_tokens = holding.shared * self._layout.page_tokens
        self._metrics.reused(prefix_tokens, job.request.prefill_tokens)
        grant = inference_pb2.GrantRequest(
            room=receiver.id,
            receiver=self._incarnation,
            generation=holding.slot.generation,
            pages=holding.exposed,
            slot=holding.slot.index,
            exposure=self._exposure.id,
            prefix_tokens=prefix_tokens,
        )
        self._granting.append((job.prefill, grant))
        if len(self.endpoints) < 2:
            self.tell_senders()
        detail = (
            f"{counted(len(holding.exposed), 'page')} behind {counted(prefix_tokens, 'token')} held,"
            f" slot {holding.slot.index}, generation {holding.slot.generation}"
        )
        self._reporter.note(receiver.id, Moment.GRANTED, detail)

    def tell_senders(self) -> None:
        """Every rank has exposed what was granted."""
        for prefill, grant in self._granting:
            self._peers.grant(prefill, grant)
        self._granting.clear()
