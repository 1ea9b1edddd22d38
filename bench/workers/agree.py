"""The command `agree`: cost of one turn's agreement between a worker's ranks."""

import json
from typing import Annotated, Final

import typer

from bench.report import AsJson, Runs

ANSWER_S: Final = 180.0
"""Longest wait for a rank's answer, in seconds. Each rank loads torch first."""


def agree(
    runs: Runs = 200,
    rooms: Annotated[int, typer.Option(min=1, max=4096, help="Places of the ballot.")] = 256,
    _: AsJson = True,
) -> None:
    """One turn's agreement of 1, 2 and 3 ranks, beside an all-reduce of the same bytes by gloo."""
    from bench.workers.agree_ranks import ballot_words, measure_group

    groups: list[dict[str, object]] = []
    ratios = []
    for size in (1, 2, 3):
        medians = measure_group(size, rooms, runs, ANSWER_S)
        if medians is None:
            typer.echo(f"baton: error: {size} ranks gave no answer within {ANSWER_S:g} s", err=True)
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
