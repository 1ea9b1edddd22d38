"""Identity of a decode worker, as prefill workers learn it when they connect."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.ids import Incarnation
from baton.pages.kv_checksum import KvChecksum
from baton.pages.layout import KvLayout
from baton.pages.record import SCHEMA_HASH
from baton.wire.baton.v1 import inference_pb2
from baton.wire.layout_messages import layout_to_wire


@dataclass(slots=True)
class ReceiverIdentity:
    """Identity and transfer endpoints of this decode worker, which it sends to prefill workers."""

    incarnation: Incarnation
    secret: bytes = field(repr=False)
    layouts: Sequence[KvLayout]
    """KV layouts of all ranks of this worker, in rank order."""
    checksum: KvChecksum
    endpoints: Sequence[inference_pb2.Endpoint] = ()
    """Present transfer endpoints of all ranks of this worker, in rank order. Empty until every rank has sent
    its own."""

    @property
    def exposure(self) -> Incarnation:
        """Id under which rank 0 exposes its memory. 0 while `endpoints` is empty."""
        return Incarnation(self.endpoints[0].incarnation if self.endpoints else 0)

    def connect(self) -> inference_pb2.ConnectRequest:
        return inference_pb2.ConnectRequest(
            endpoints=self.endpoints,
            layouts=[layout_to_wire(each) for each in self.layouts],
            schema=SCHEMA_HASH,
            kv_checksum=self.checksum.value,
        )
