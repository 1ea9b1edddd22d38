"""The command `burst`: answers and failures of many requests at once."""

import json
from typing import Annotated, Final

import typer

from baton.runtime.errors import StartupError
from baton.runtime.service_process import report_startup_error
from bench.report import AsJson

SIZES: Final = "64,256,1000,2000"
OUTPUTS: Final = "2,32"


def burst(
    sizes: Annotated[str, typer.Option(help="Requests that come at once, burst by burst.")] = SIZES,
    rate: Annotated[float, typer.Option(min=0, max=100_000, help="Then so many a second; 0: none.")] = 100,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="For so long.")] = 60,
    output_tokens: Annotated[str, typer.Option(help="Of each request; all of the above for each.")] = OUTPUTS,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = 32,
    concurrency: Annotated[
        int, typer.Option(min=1, max=4096, help="Requests at a time, for the sustained rate.")
    ] = 32,
    sustained: Annotated[int, typer.Option(min=8, max=100_000, help="Requests of it.")] = 512,
    busy: Annotated[
        int, typer.Option(min=0, max=64, help="Processes beside it that do nothing but compute.")
    ] = 0,
    vocabulary: Annotated[int, typer.Option(min=200, help="Token ids drawn are below this.")] = 32_000,
    url: Annotated[str, typer.Option(help="A stack that runs already, with /metrics on its port.")] = "",
    flags: Annotated[str, typer.Option(help="Of `baton serve`, when it is started here.")] = "",
    seed: Annotated[int, typer.Option(help="The same seed asks the same.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest a request may take.")] = 600,
    _: AsJson = True,
) -> None:
    """Bursts and a steady flow of short requests: what was answered, how, and what failed on the way.

    `ratio`: time to the last answer, beside that of as many requests at the sustained rate of this run.
    """
    import uvloop

    from bench.serving.bursts import BurstPlan, measure
    from bench.serving.stack import running

    try:
        plan = BurstPlan(
            sizes=parse_numbers(sizes, "--sizes"),
            outputs=parse_numbers(output_tokens, "--output-tokens"),
            prompt_tokens=prompt_tokens,
            rate=rate,
            seconds=seconds,
            concurrency=concurrency,
            sustained=sustained,
            busy=busy,
            vocabulary=vocabulary,
            seed=seed,
            timeout_s=timeout_s,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with running(url, flags) as address:
            told = uvloop.run(measure(address, plan))
    except StartupError as error:
        raise typer.Exit(report_startup_error(error)) from None
    print(json.dumps({"benchmark": "burst", "url": url, "flags": flags, **told}))


def parse_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Parse numbers with commas between them. Raises ValueError."""
    try:
        numbers = tuple(int(each) for each in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {text}: numbers with commas between them, such as 64,256") from None
    if min(numbers) < 1:
        raise ValueError(f"{flag} {text}: each is at least 1")
    return numbers
