"""The command `choices`: KV bytes and first-token times of several answers, beside one."""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from bench.report import AsJson, Runs


def choices(
    runs: Runs = 10,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Of each request; every prompt is another.")
    ] = 1000,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 4,
    answers: Annotated[int, typer.Option("--n", min=2, max=128, help="Answers beside one.")] = 8,
    url: Annotated[str, typer.Option(help="A stack on this host that runs already.")] = "",
    flags: Annotated[str, typer.Option(help="Of `baton serve`, when it is started here.")] = "",
    _: AsJson = True,
) -> None:
    """Requests with one answer and with several, one at a time and in turns.

    `ratio`: the time until the first token of any answer, several beside one. `ratio_every`: until each of
    them has its first token, beside the one's.
    """
    from bench.rooms.choice_times import measured
    from bench.serving.stack import running

    with running(url, flags) as address:
        found = measured(address, runs, prompt_tokens, output_tokens, answers)
    one, several = found[1], found[answers]
    body = {
        "benchmark": "choices",
        "runs": runs,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "n": answers,
        "bytes": {str(n): sorted({each["bytes"] for each in asked}) for n, asked in found.items()},
        "first_token_ms": {str(n): _median_ms(asked, "first") for n, asked in found.items()},
        "every_first_token_ms": {str(n): _median_ms(asked, "every") for n, asked in found.items()},
        "whole_ms": {str(n): _median_ms(asked, "whole") for n, asked in found.items()},
        "ratio": round(_median_ms(several, "first") / _median_ms(one, "first"), 3),
        "ratio_every": round(_median_ms(several, "every") / _median_ms(one, "every"), 3),
    }
    print(json.dumps(body))


def _median_ms(asked: Sequence[Mapping[str, int]], name: str) -> float:
    return round(statistics.median(each[name] for each in asked) / 1000, 3)
