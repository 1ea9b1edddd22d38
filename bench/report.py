"""Output of a benchmark: one JSON object with medians and their ratio to a limit of the same run."""

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON. There is no other form.")]
Runs = Annotated[int, typer.Option(min=3, max=1000, help="Measurements of each, taken in turns.")]


def print_result(name: str, seconds: dict[str, list[float]], limit: str, facts: dict[str, object]) -> None:
    """Print the result. `ratio` is the median of the measured part divided by that of `limit`."""
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


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
