"""The command `handover`: stages of a request, and what its hand-over costs beside the transfer."""

import json
import statistics
from typing import Annotated, Final

import typer

from bench.report import AsJson, Runs

ANSWER_S: Final = 120.0
CHUNK_MIB: Final = 4


def handover(
    runs: Runs = 20,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Of each request; every prompt is another.")
    ] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, help="Drawn for each request.")] = 8,
    url: Annotated[str, typer.Option(help="A stack on this host that runs already.")] = "",
    flags: Annotated[str, typer.Option(help="Of `baton serve`, when it is started here.")] = "",
    device: Annotated[
        str, typer.Option(help="Whose memory the bare write is between: cpu or cuda[:N].")
    ] = "cpu",
    _: AsJson = True,
) -> None:
    """Stages of requests that come one at a time, from the timelines of their rooms.

    `own`: from the room's opening to its admission, less the time that its chunks were computed, less the
    time that a bare NIXL write of its bytes takes in this run.
    """
    from bench.pages.device_memory import numbered
    from bench.pages.transfer_pair import MIB, Case, measure
    from bench.rooms.room_times import STAGES, measure_rooms
    from bench.serving.stack import running

    bare = measure([Case(CHUNK_MIB)], runs, CHUNK_MIB * MIB, ANSWER_S, numbered(device))
    if bare is None:
        typer.echo(f"baton: error: the other process gave no answer within {ANSWER_S:g} s", err=True)
        raise typer.Exit(1)
    size, seconds = bare[0].length, bare[0].next
    bytes_s = size / min(statistics.median(each) for key, each in seconds.items() if key.startswith("nixl"))
    # A room that decode computes itself has no hand-over.
    with running(url, f"--local-gap-ms 0 {flags}") as address:
        rooms = measure_rooms(address, runs, prompt_tokens, output_tokens)
    spent_us, hidden_us = sum(each.transfer_us for each in rooms), sum(each.hidden_us for each in rooms)
    body = {
        "benchmark": "handover",
        "runs": len(rooms),
        "prompt_tokens": prompt_tokens,
        "chunks": statistics.median(each.chunks for each in rooms),
        "bytes": statistics.median(each.length for each in rooms),
        "nixl_gigabytes_s": round(bytes_s / 1e9, 2),
        "stages_ms": {
            name: _median_ms([each.between(begin, end) for each in rooms])
            for name, (begin, end) in STAGES.items()
        },
        "handover_ms": _median_ms([each.handover_us for each in rooms]),
        "compute_ms": _median_ms([each.compute_us for each in rooms]),
        "transfer_ms": _median_ms([each.transfer_us for each in rooms]),
        "own_ms": _median_ms(
            [each.handover_us - each.compute_us - each.length / bytes_s * 1e6 for each in rooms]
        ),
        "hidden": round(hidden_us / spent_us, 3) if spent_us else 1.0,
    }
    print(json.dumps(body))


def _median_ms(values_us: list[float]) -> float:
    return round(statistics.median(values_us) / 1000, 3)
