"""The command `speculation`: output rate with draft tokens and without."""

import json
from pathlib import Path
from typing import Annotated

import typer

from bench.report import AsJson, Runs


def speculation(
    prompts: Annotated[
        list[Path] | None,
        typer.Argument(help="Files with a JSON object a line: a `prompt`, and its `max_tokens`."),
    ] = None,
    runs: Runs = 5,
    concurrency: Annotated[str, typer.Option(help="Requests at a time, by commas.")] = "1,4",
    random_tokens: Annotated[
        int, typer.Option(min=0, help="Of the answers to random prompts, drawn at temperature 1 (0: none).")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Of random prompts.")] = 0,
    url: Annotated[str, typer.Option(help="A stack on this host that runs already, with --speculate.")] = "",
    speculate: Annotated[str, typer.Option(help="What drafts, as of `baton decode --speculate`.")] = "ngram",
    flags: Annotated[str, typer.Option(help="Of `baton serve`, when it is started here.")] = "",
    _: AsJson = True,
) -> None:
    """The same requests with drafts and without (`speculate`), to one stack, in turns.

    `ratio`: output tokens a second with drafts beside those without, the median of the rounds. `equal`:
    answers that are the same with and without, token for token.
    """
    from bench.engine.speculation_load import SpeculationPlan, measure
    from bench.serving.stack import running

    try:
        at_a_time = [int(each) for each in concurrency.split(",")]
        plan = SpeculationPlan(runs, at_a_time, prompts or [], random_tokens, seed)
        plan.loads()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with running(url, f"--speculate {speculate} {flags}") as address:
        found = measure(address, plan)
    print(
        json.dumps(
            {"benchmark": "speculation", "runs": runs, "speculate": speculate, "flags": flags, "loads": found}
        )
    )
