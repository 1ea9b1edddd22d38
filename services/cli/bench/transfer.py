"""How fast do bytes reach another process over NIXL?"""

import multiprocessing
from multiprocessing.connection import Connection
from typing import Annotated, Final

import typer

from services.cli.bench.report import Runs, seconds_of, tell

MIB: Final = 2**20
REGION_BYTES: Final = 64 * MIB
ANSWER_S: Final = 60.0


def transfer(
    runs: Runs = 15, window: Annotated[int, typer.Option(min=1, max=64, help="MiB a write.")] = 4
) -> None:
    """Write 64 MiB into another process in windows, beside memcpy of 64 MiB."""
    from services.rooms.ids import Incarnation
    from services.runtime.host_memory import HostMemory
    from services.transfer.interface import PutState, Region, Run
    from services.transfer.nixl import NixlTransfer

    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=_receive, args=(theirs,), daemon=True)
    peer.start()
    if not mine.poll(ANSWER_S):
        raise typer.Exit(1)
    endpoint = mine.recv()
    memory, copy = HostMemory(REGION_BYTES), HostMemory(REGION_BYTES)
    sender = NixlTransfer(Incarnation(1))
    sender.register(Region("kv", memory.address, memory.length))
    sender.connect(endpoint)
    starts = range(0, REGION_BYTES, window * MIB)

    def write() -> None:
        for start in starts:
            length = min(window * MIB, REGION_BYTES - start)
            put = sender.put(endpoint.incarnation, "kv", [Run(start, start, length)])
            while sender.poll(put) is PutState.PENDING:
                pass

    def memcpy() -> None:
        copy.view[:] = memory.view

    write()
    memcpy()
    seconds: dict[str, list[float]] = {"nixl": [], "memcpy": []}
    for _ in range(runs):
        seconds["nixl"].append(seconds_of(write))
        seconds["memcpy"].append(seconds_of(memcpy))
    mine.send("done")
    peer.join(ANSWER_S)
    sender.close()
    tell("transfer", seconds, "memcpy", {"bytes": REGION_BYTES, "window_bytes": window * MIB})


def _receive(pipe: Connection) -> None:
    """The other process: memory to be written to, until the pipe says that it is over."""
    from services.rooms.ids import Incarnation
    from services.runtime.host_memory import HostMemory
    from services.transfer.interface import Region
    from services.transfer.nixl import NixlTransfer

    memory = HostMemory(REGION_BYTES)
    receiver = NixlTransfer(Incarnation(2))
    receiver.register(Region("kv", memory.address, memory.length))
    pipe.send(receiver.endpoint())
    while not pipe.poll(0.001):
        receiver.notices()
    receiver.close()
