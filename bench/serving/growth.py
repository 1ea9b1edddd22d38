"""The command `growth`: chats whose memory grows, on a cache that does not hold all of them."""

import json
from typing import Annotated, Final

import typer

from baton.runtime.errors import StartupError
from baton.runtime.service_process import report_startup_error
from baton.runtime.setting_kinds import SIZE, BadValue
from bench.report import AsJson

CACHE: Final = "1GiB"


def growth(
    chats: Annotated[
        int, typer.Option(min=1, max=4096, help="Asked at once, each to the context's end.")
    ] = 64,
    context_length: Annotated[int, typer.Option(min=64, help="Tokens of one, prompt and answer.")] = 1024,
    cache: Annotated[str, typer.Option(help="Memory for KV pages of the stack that is judged.")] = CACHE,
    prompt_tokens: Annotated[str, typer.Option(help="Shortest and longest prompt, such as 16-64.")] = "16-64",
    dtype: Annotated[
        str, typer.Option(help="float32: answers are equal whatever runs beside them.")
    ] = "float32",
    alone: Annotated[int, typer.Option(min=0, help="Chats that are asked once more, one at a time.")] = 2,
    only: Annotated[str, typer.Option(help="Some of the caches, by commas: whole,default,quarter.")] = "",
    flags: Annotated[str, typer.Option(help="Of `baton serve`, beside these.")] = "",
    seed: Annotated[int, typer.Option(help="The same seed asks the same.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest a chat may take.")] = 3600,
    _: AsJson = True,
) -> None:
    """Chats without an end and without `max_tokens`, all at once, on three stacks, one after the other: with
    --cache, with a cache that holds all of them to their ends, and with a quarter of --cache.

    `ratio`: tokens a second beside those of the stack whose cache holds everything. Half of the chats are
    greedy, half are seeded; `equal` counts the answers that are the same there, token for token.
    """
    from bench.serving.growth_stacks import GrowthPlan, measure

    try:
        plan = GrowthPlan(
            chats=chats,
            context_tokens=context_length,
            cache_bytes=SIZE.parse(cache),
            prompt_tokens=_range(prompt_tokens),
            dtype=dtype,
            alone=alone,
            only=tuple(filter(None, only.split(","))),
            flags=flags,
            seed=seed,
            timeout_s=timeout_s,
        )
    except BadValue as error:
        raise typer.BadParameter(f"--cache {cache} is not allowed: use {error}") from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        print(json.dumps({"benchmark": "growth", **measure(plan, lambda text: typer.echo(text, err=True))}))
    except StartupError as error:
        raise typer.Exit(report_startup_error(error)) from None


def _range(text: str) -> tuple[int, int]:
    """Parse `16-64` or `16`. Raises ValueError."""
    low, _, high = text.partition("-")
    try:
        lengths = int(low), int(high or low)
    except ValueError:
        raise ValueError(f"--prompt-tokens {text}: it has to be like 16-64") from None
    if not 1 <= lengths[0] <= lengths[1]:
        raise ValueError(f"--prompt-tokens {text}: the first is at least 1, and at most the second")
    return lengths
