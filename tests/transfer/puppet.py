"""A transfer endpoint in another process, driven by a test.

The child drives its endpoint all the time, unless told to pause, and answers one call at a time.
"""

from collections.abc import Callable, Mapping
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from baton.ids import Incarnation
from baton.runtime.host_memory import HostMemory
from baton.transfer.exposure import Exposure
from baton.transfer.transfer_protocol import Endpoint
from bench.pages.device_memory import DeviceMemory
from tests.transfer.child import Child

IDLE_S: Final = 0.0005
NEXT_EXPOSURE: Final = 0x100
"""Difference between the ids of two successive exposures."""


class Puppet(Child):
    """A process that exposes one region, "kv"."""

    def __init__(
        self,
        incarnation: int,
        agent: str | None,
        length: int,
        environment: Mapping[str, str],
        output: Path,
        device: str = "cpu",
    ) -> None:
        """`length`: bytes of "kv", on `device`."""
        self.incarnation = Incarnation(incarnation)
        super().__init__(_live, (self.incarnation, agent, length, device), dict(environment), output)

    def endpoint(self) -> Endpoint:
        endpoint: Endpoint = self.ask("endpoint")
        return endpoint

    def revoke(self) -> None:
        """Take the memory away from every peer; what it is exposed as next has another incarnation."""
        self.ask("revoke")
        self.incarnation = self.endpoint().incarnation


class _Contents:
    """Access to the content of a memory region as bytes, on the CPU or a GPU."""

    def __init__(self, memory: HostMemory | DeviceMemory) -> None:
        self._memory = memory

    def read(self) -> bytes:
        if isinstance(self._memory, HostMemory):
            return bytes(self._memory.view)
        return self._memory.tensor.cpu().numpy().tobytes()

    def write(self, contents: bytes) -> None:
        """Returns when they are there."""
        if isinstance(self._memory, HostMemory):
            self._memory.view[:] = contents
            return
        import torch

        self._memory.tensor.copy_(torch.frombuffer(bytearray(contents), dtype=torch.uint8))
        torch.cuda.synchronize(self._memory.device)

    def view(self) -> memoryview:
        """Return a view of the region's bytes that stays right after the memory has moved. Raises TypeError
        on a GPU."""
        if not isinstance(self._memory, HostMemory):
            raise TypeError("a GPU's memory does not move")
        return self._memory.view


def _live(pipe: Connection, incarnation: Incarnation, agent: str | None, length: int, device: str) -> None:
    from baton.transfer.nixl import NixlTransfer

    memory = HostMemory(length) if device == "cpu" else DeviceMemory(length, device)
    contents = _Contents(memory)
    ids = count(incarnation, NEXT_EXPOSURE)
    exposure = Exposure(
        lambda each: NixlTransfer(each, agent if each == incarnation else None),
        lambda: Incarnation(next(ids)),
        {"kv": memory},
    )
    sinks: list[memoryview] = []
    driving = True

    def drive(on: bool) -> None:
        nonlocal driving
        driving = on

    def fill(byte: int) -> None:
        contents.write(bytes([byte]) * length)

    def revoke() -> None:
        sinks.append(contents.view())
        exposure.revoke()

    def release() -> None:
        """Release all posted writes, as an abort would that trusts the library."""
        transfer: Any = exposure.transfer
        for write in transfer.ledger.under_way():
            write.handle.release()

    own: dict[str, Callable[..., Any]] = {
        "drive": drive,
        "fill": fill,
        "count": lambda byte: contents.read().count(byte),
        "read": contents.read,
        "write": contents.write,
        "count_in_sinks": lambda byte: sum(bytes(sink).count(byte) for sink in sinks),
        "revoke": revoke,
        "release": release,
    }
    while True:
        if driving:
            exposure.transfer.progress()
        if not pipe.poll(IDLE_S):
            continue
        what, arguments = pipe.recv()
        if what == "leave":
            exposure.close()
            return
        try:
            pipe.send(own[what](*arguments) if what in own else getattr(exposure.transfer, what)(*arguments))
        except Exception as error:
            pipe.send(error)
