"""The command `turn`: cost of one turn of a worker that holds many rooms."""

import json
from typing import Annotated

import typer

from bench.report import AsJson, Runs


def turn(
    runs: Runs = 200,
    rooms: Annotated[int, typer.Option(min=10, max=4096, help="That the worker holds.")] = 250,
    burst: Annotated[int, typer.Option(min=1, max=16_384, help="Rooms that come at once.")] = 1000,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each of these.")] = 2000,
    _: AsJson = True,
) -> None:
    """A turn's core time with rooms in all phases, and with all running, beside one pass over the rooms.

    `beside`: while a step of the model runs, and nothing happens. `ended`: a turn that sees a step end, tells
    what it computed and starts the next. `bursts`: the longest turn, and all, until a burst is in.
    """
    from bench.workers.turn_workers import measure

    workers, bursts = measure(runs, rooms, burst, prompt_tokens)
    body = {
        "benchmark": "turn",
        "runs": runs,
        "rooms": rooms,
        "workers": [each.figures() for each in workers],
        "bursts": [each.figures() for each in bursts],
        "ratio": round(max(each.beside_s / each.pass_s for each in workers), 2),
        "ratio_of": ["beside", "pass"],
    }
    print(json.dumps(body))
