"""The command `place`: cost of a placement before many workers and with many open rooms."""

import json
from typing import Annotated

import typer

from bench.report import AsJson, Runs


def place(
    runs: Runs = 200,
    workers: Annotated[int, typer.Option(min=2, max=10_000, help="Of each side, of the large stack.")] = 1000,
    few: Annotated[int, typer.Option(min=2, max=10_000, help="Of each side, of the small stack.")] = 10,
    rooms: Annotated[int, typer.Option(min=1, max=1_000_000, help="Open at once.")] = 100_000,
    _: AsJson = True,
) -> None:
    """The registry alone, before many workers beside few, and with many rooms beside as many as its runs.

    `place`: a pair for a prompt that begins as others do, and its room. `register`: all workers, in seconds.
    `load`: a decode worker's word of what is used of it. `look`: what is asked of the registry at each look
    at the time, at each scrape and by each renewal.
    """
    from bench.router.place_stack import measure

    body = measure(runs, workers, few, rooms)
    print(json.dumps({"benchmark": "place", **body}))
