"""Endpoints with memory of their own, for tests of any transfer backend."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from baton.ids import Incarnation
from baton.runtime.host_memory import HostMemory
from baton.transfer.transfer_protocol import PutId, PutState, Region, Run, Transfer

KV_BYTES: Final = 1 << 20
SLOTS_BYTES: Final = 4096
PATIENCE_S: Final = 30.0
"""Longest wait for anything before a test gives up, seconds. Nothing is measured against it."""

MakeTransfer = Callable[[Incarnation, str | None], Transfer]


@dataclass
class Node:
    """An endpoint and its memory."""

    incarnation: Incarnation
    transfer: Transfer
    memory: dict[str, HostMemory]

    def fill(self, region: str, byte: int) -> None:
        self.memory[region].view[:] = bytes([byte]) * self.memory[region].length

    def read(self, region: str, start: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else start + length
        return bytes(self.memory[region].view[start:end])


class Bench:
    """Makes endpoints of one backend, drives them all, and closes them."""

    def __init__(self, make: MakeTransfer) -> None:
        self.make = make
        self._incarnations = count(0x1000)
        self.nodes: list[Node] = []

    def blank(self, agent: str | None = None) -> Transfer:
        """Return an endpoint without regions, which the caller has to close."""
        return self.make(self.fresh(), agent)

    def fresh(self) -> Incarnation:
        return Incarnation(next(self._incarnations))

    def node(self, agent: str | None = None, kv_bytes: int = KV_BYTES) -> Node:
        """Return an endpoint with the regions "kv" and "slots", zeroed."""
        incarnation = self.fresh()
        memory = {"kv": HostMemory(kv_bytes), "slots": HostMemory(SLOTS_BYTES)}
        node = Node(incarnation, self.make(incarnation, agent), memory)
        for name, held in memory.items():
            node.transfer.register(Region(name, held.address, held.length))
        self.nodes.append(node)
        return node

    def pair(self) -> tuple[Node, Node]:
        """Return two endpoints, of which the first is connected to the second, but not the other way
        round."""
        sender, receiver = self.node(), self.node()
        sender.transfer.connect(receiver.transfer.endpoint())
        return sender, receiver

    def until(self, done: Callable[[], bool]) -> None:
        """Drive every endpoint until `done`. Fails when patience ends."""
        give_up = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < give_up, "it did not happen"
            for node in self.nodes:
                node.transfer.progress()

    def finish(self, node: Node, put: PutId) -> PutState:
        """Drive everything until `put` has ended; how it did."""
        states: list[PutState] = []

        def ended() -> bool:
            states.append(node.transfer.poll(put))
            return states[-1] is not PutState.PENDING

        self.until(ended)
        return states[-1]

    def send(self, sender: Node, receiver: Node, region: str, runs: Sequence[Run]) -> PutState:
        return self.finish(sender, sender.transfer.put(receiver.incarnation, region, runs))

    def shut(self, node: Node) -> None:
        """Close one endpoint, and stop driving it."""
        node.transfer.close()
        self.nodes.remove(node)

    def close(self) -> None:
        for node in self.nodes:
            node.transfer.close()
