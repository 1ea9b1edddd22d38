"""The command `rooms`: rooms a second from opened to retired, with an engine that costs nothing."""

import json
import statistics
from typing import Annotated, Final

import typer

from bench.report import AsJson

ANSWER_S: Final = 120.0


def rooms(
    runs: Annotated[int, typer.Option(min=1, max=1000, help="Rounds, each of rooms and of calls.")] = 5,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="Rooms, and bare calls, a round.")] = 200,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Rooms at a time.")] = 16,
    _: AsJson = True,
) -> None:
    """Rooms through the registry and the turns of two workers with a toy engine, beside bare gRPC calls."""
    from bench.rooms.rooms_stack import measure

    rounds = measure(runs, count, concurrency, ANSWER_S)
    medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    body = {
        "benchmark": "rooms",
        "runs": runs,
        "rooms": count,
        "concurrency": concurrency,
        "rooms_s": round(count / medians["rooms"], 1),
        "calls_s": round(count / medians["calls"], 1),
        "cpu_ms_a_room": {
            part: round(medians[f"{part} cpu"] * 1000 / count, 3)
            for part in ("registry", "prefill", "decode")
        },
        "turns_a_room": {part: round(medians[f"{part} turns"] / count, 2) for part in ("prefill", "decode")},
        "ratio": round(medians["rooms"] / medians["calls"], 2),
        "ratio_of": ["rooms", "calls"],
    }
    print(json.dumps(body))
