"""The ranks of two workers in one process: memories whose every word says what it is, and the ways between
them."""

import struct
from collections.abc import Sequence
from typing import Final

from baton.decode.prefill_peers import endpoint_to_wire
from baton.ids import Generation, Incarnation, RoomId
from baton.pages.layout import KvLayout
from baton.pages.rank_layout import rank_layout
from baton.pages.record import SCHEMA_HASH, SLOT_BYTES, MetadataRecord, read_slot
from baton.prefill.routes import Routes
from baton.runtime.host_memory import HostMemory
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.memory_transfer import MemoryTransfer
from baton.topology import Topology
from baton.transfer.transfer_protocol import PutId, Region, Run, kv_region
from baton.wire.baton.v1 import inference_pb2
from baton.wire.layout_messages import layout_to_wire
from tests.layouts import changed, group_of, one_group

WHOLE: Final = one_group("toy", "float32", 4, (0, 3, 5), (1, 2), 1)
PAGES: Final = 12
PLACES: Final = 4
WORD: Final = struct.Struct("<4B")
RECEIVER: Final = Incarnation(20)
SENDER_RANKS: Final = Incarnation(100)
RECEIVER_RANKS: Final = Incarnation(200)


def layouts(topology: Topology, page_tokens: int = 4) -> list[KvLayout]:
    whole = changed(WHOLE, page_tokens=page_tokens)
    return [rank_layout(whole, topology, rank) for rank in range(topology.ranks)]


def word(layer: int, half: int, head: int, position: int) -> bytes:
    return WORD.pack(layer + 1, half + 1, head, position + 1)


class RankMemory(MemoryTransfer):
    """The memory of one rank, which records each put that it posts."""

    def __init__(self, fabric: MemoryFabric, incarnation: Incarnation, layout: KvLayout) -> None:
        super().__init__(fabric, incarnation)
        self.layout = layout
        self.kv = HostMemory(PAGES * group_of(layout).page_bytes)
        self.slots = HostMemory(PLACES * SLOT_BYTES)
        self.register(Region(kv_region(0), self.kv.address, self.kv.length))
        self.register(Region("slots", self.slots.address, self.slots.length))
        self.known = self.endpoint()
        self.posted: list[tuple[Incarnation, str, int]] = []
        """Puts that were posted: the receiver, the region, and how many puts were under way by then."""

    def put(self, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        under_way = sum(self.pending(each) for each in {peer for peer, _, _ in self.posted})
        self.posted.append((peer, region, under_way))
        return super().put(peer, region, runs)

    def fill(self, table: Sequence[int], tokens: int) -> None:
        """Write positions [0, tokens) into a room's pages, given by its page table."""
        for at, found in self._words(table, 0, tokens):
            self.kv.view[at : at + WORD.size] = found

    def holds(self, table: Sequence[int], first: int, start: int, stop: int) -> bool:
        """Return whether the pages hold positions [start, stop). Page 0 of the table begins with position
        `first`."""
        shifted = [*[0] * (first // group_of(self.layout).page_tokens), *table]
        return all(
            bytes(self.kv.view[at : at + WORD.size]) == found
            for at, found in self._words(shifted, start, stop)
        )

    def _words(self, table: Sequence[int], start: int, stop: int) -> list[tuple[int, bytes]]:
        group, found = group_of(self.layout), list[tuple[int, bytes]]()
        for position in range(start, stop):
            page, token = divmod(position, group.page_tokens)
            lane = 0
            for layer, head in group.places():
                for plane in range(len(group.planes)):
                    at = table[page] * group.page_bytes + (lane * group.page_tokens + token) * WORD.size
                    found.append((at, word(layer, plane, head, position)))
                    lane += 1
        return found

    def record(self, slot: int, room: int, generation: int) -> MetadataRecord | None:
        return read_slot(
            self.slots.view[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES], RoomId(room), Generation(generation)
        )


class Ranks:
    """The ranks of a sender and of the receiver that it connects to."""

    def __init__(
        self,
        fabric: MemoryFabric,
        senders: Topology,
        receivers: Topology,
        page_tokens: tuple[int, int] = (4, 4),
    ) -> None:
        self.fabric = fabric
        mine, theirs = layouts(senders, page_tokens[0]), layouts(receivers, page_tokens[1])
        self.senders = [
            RankMemory(fabric, Incarnation(SENDER_RANKS + rank), each) for rank, each in enumerate(mine)
        ]
        self.receivers = [
            RankMemory(fabric, Incarnation(RECEIVER_RANKS + rank), each) for rank, each in enumerate(theirs)
        ]
        self.routes = [Routes(transfer, mine, rank) for rank, transfer in enumerate(self.senders)]

    def request(self) -> inference_pb2.ConnectRequest:
        """Return the connect request of the receiver's leader."""
        return inference_pb2.ConnectRequest(
            receiver=RECEIVER,
            endpoints=[endpoint_to_wire(each.known) for each in self.receivers],
            layouts=[layout_to_wire(each.layout) for each in self.receivers],
            schema=SCHEMA_HASH,
        )

    def connect(self) -> None:
        for each in self.routes:
            each.connect(self.request())
