"""How far from the machine's limits is a part of Baton? Each command measures both in one run, in turns.

    baton bench transfer    pages over NIXL between two processes, beside memcpy of the same bytes
    baton bench step        one decode step, beside reading the model's weights once
    baton bench agree       a turn's agreement of 1, 2 and 3 ranks, beside gloo's all-reduce of the same bytes

Each prints one JSON object with the medians and their ratio. Absolute times are the machine's; quote ratios.
"""

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Annotated, Final

import typer

MIB: Final = 2**20
REGION_BYTES: Final = 64 * MIB
ANSWER_S: Final = 60.0
GROUP_ANSWER_S: Final = 180.0
"""Each rank loads torch first."""

bench = typer.Typer(name="bench", help="Measure a part beside its limit; prints JSON.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON. There is no other form.")]
Runs = Annotated[int, typer.Option(min=3, max=1000, help="Measurements of each, taken in turns.")]


def _print(name: str, seconds: dict[str, list[float]], limit: str, facts: dict[str, object]) -> None:
    """`ratio`: how many times the limit's time the measured part takes, median by median."""
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    measured = next(key for key in medians if key != limit)
    body = {
        "benchmark": name,
        **facts,
        "median_ms": {key: round(value * 1000, 3) for key, value in medians.items()},
        "ratio": round(medians[measured] / medians[limit], 3),
        "ratio_of": [measured, limit],
    }
    print(json.dumps(body))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@bench.command()
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
        seconds["nixl"].append(_seconds(write))
        seconds["memcpy"].append(_seconds(memcpy))
    mine.send("done")
    peer.join(ANSWER_S)
    sender.close()
    _print("transfer", seconds, "memcpy", {"bytes": REGION_BYTES, "window_bytes": window * MIB})


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


@bench.command()
def step(
    runs: Runs = 15,
    model: Annotated[str, typer.Option(help="A model directory, a GGUF file, or the word demo.")] = "demo",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    batch: Annotated[int, typer.Option(min=1, max=256, help="Sequences in the step.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 512,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
) -> None:
    """One decode step, beside reading every weight once."""
    import torch

    from services.engine.engine import Row, Sequence, load_engine
    from services.rooms.request import Request, Sampling
    from services.runtime.model_files import prepare, resolve

    directory = prepare(resolve(model), lambda _: None)
    engine = load_engine(directory, dtype=dtype, device="cpu", kv_cache_memory=2**30, threads=threads)
    greedy = Sampling(temperature=0.0)
    sequences = [
        Sequence(Request(f"bench-{index}", (7,) * context, max_tokens=2, sampling=greedy), [7])
        for index in range(batch)
    ]
    pages = engine.layout.pages_for(context + 1)
    tables = [list(range(index * pages, (index + 1) * pages)) for index in range(batch)]
    for sequence, table in zip(sequences, tables, strict=True):
        engine.step([Row(sequence, 0, context, table, sample=False)])
    rows = [
        Row(sequence, context, context + 1, table, sample=True)
        for sequence, table in zip(sequences, tables, strict=True)
    ]
    weights = engine.model.weights()

    def read() -> None:
        for weight in weights:
            torch.sum(weight.view(-1).view(torch.float32))

    engine.step(rows)
    seconds: dict[str, list[float]] = {"step": [], "read_weights": []}
    for _ in range(runs):
        seconds["step"].append(_seconds(lambda: engine.step(rows)))
        seconds["read_weights"].append(_seconds(read))
    size = sum(each.numel() * each.element_size() for each in weights)
    facts: dict[str, object] = {"batch": batch, "context": context, "dtype": dtype, "weight_bytes": size}
    _print("step", seconds, "read_weights", facts)


@bench.command()
def agree(
    runs: Runs = 200,
    rooms: Annotated[int, typer.Option(min=1, max=4096, help="Places of the ballot.")] = 256,
    _: AsJson = True,
) -> None:
    """What 1, 2 and 3 ranks pay for a turn's agreement, beside a bare all-reduce of the same bytes."""
    from services.cli.agree_bench import ballot_words, measure_group

    groups: list[dict[str, object]] = []
    ratios = []
    for size in (1, 2, 3):
        medians = measure_group(size, rooms, runs, GROUP_ANSWER_S)
        if medians is None:
            typer.echo(f"baton: error: {size} ranks gave no answer within {GROUP_ANSWER_S:g} s", err=True)
            raise typer.Exit(1)
        ratios.append(round(medians["agree"] / medians["all_reduce"], 3))
        groups.append(
            {
                "ranks": size,
                "median_ms": {key: round(value * 1000, 3) for key, value in medians.items()},
                "wake_ms": round(medians["wake"] * 1000, 3),
                "ratio": ratios[-1],
            }
        )
    body = {
        "benchmark": "agree",
        "runs": runs,
        "rooms": rooms,
        "bytes": 8 * ballot_words(rooms),
        "groups": groups,
        "ratio": max(ratios),
        "ratio_of": ["agree", "all_reduce"],
    }
    print(json.dumps(body))
