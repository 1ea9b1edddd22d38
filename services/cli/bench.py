"""The command `baton bench serve`: latency and throughput of a running server."""

import json
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from baton.launch.serve_settings import DEFAULT_URL
from baton.runtime.errors import StartupError
from baton.runtime.service_process import raise_open_file_limit, report_startup_error

if TYPE_CHECKING:
    from baton.cli.load_benchmark import LoadShape
    from baton.cli.load_client import LoadResult

CONCURRENCY: Final = 4
REQUESTS_MIN: Final = 32

bench = typer.Typer(name="bench", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Measure a running server. Parts of Baton are measured by `python -m bench` in its source tree."""


@bench.command()
def serve(
    url: Annotated[str, typer.Option(help="Where the server is, with or without /v1.")] = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="Default: the first that the server lists.")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = "",
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    prompt_tokens: Annotated[int, typer.Option(min=1, max=10_000_000, help="Length of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, max=10_000_000, help="Length of each answer.")] = 64,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for all of --output-tokens.")] = True,
    shared_prefix: Annotated[float, typer.Option(min=0, max=1, help="Share of a prompt common to all.")] = 0,
    vocabulary: Annotated[int, typer.Option(min=200, help="Token ids drawn are below this.")] = 32_000,
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=4096, help=f"Requests at a time; default: {CONCURRENCY}.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e6, help="Requests a second at random times, not --concurrency."),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=0, max=100_000, help="0: 32, or four for each at a time, if that is more.")
    ] = 0,
    warm_up: Annotated[int, typer.Option(min=0, max=1000, help="Requests before, not measured.")] = 4,
    ttft_slo_ms: Annotated[float | None, typer.Option(min=0, help="Longest TTFT, for goodput.")] = None,
    tpot_slo_ms: Annotated[float | None, typer.Option(min=0, help="Longest time per token.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed sends the same requests.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest time of a request.")] = 600,
    _: Annotated[bool, typer.Option("--json", help="Print JSON. There is no other form.")] = True,
) -> None:
    """Time to the first token, gaps between tokens, tokens a second, as one JSON object."""
    import uvloop

    from baton.cli.load_benchmark import ApiEndpoint, Workload, measure
    from baton.cli.load_client import connect

    shape = _load_shape(rate, concurrency, requests)
    try:
        workload = Workload(
            prompt_tokens,
            output_tokens,
            ApiEndpoint(endpoint),
            shared_prefix,
            vocabulary,
            ignore_eos,
            seed=seed,
        )
        client = connect(url, api_key, timeout_s)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except StartupError as error:
        raise typer.Exit(report_startup_error(error)) from None

    async def run() -> "tuple[dict[str, Any], LoadResult]":
        async with client:
            return await measure(client, workload, shape, model=model, warm_up=warm_up, timeout_s=timeout_s)

    raise_open_file_limit()
    try:
        settings, result = uvloop.run(run())
    except StartupError as error:
        raise typer.Exit(report_startup_error(error)) from None
    print(json.dumps({"benchmark": "serve", **settings, **_figures(result, ttft_slo_ms, tpot_slo_ms)}))


def _load_shape(rate: float | None, concurrency: int | None, requests: int) -> "LoadShape":
    """Return the load that the flags ask for. Raises BadParameter."""
    from baton.cli.load_benchmark import MAX_IN_FLIGHT, LoadShape

    if rate is not None and concurrency is not None:
        raise typer.BadParameter("--rate and --concurrency: give one of them")
    at_a_time = MAX_IN_FLIGHT if rate is not None else concurrency or CONCURRENCY
    count = requests or (REQUESTS_MIN if rate is not None else max(REQUESTS_MIN, 4 * at_a_time))
    if rate is None and count < at_a_time:
        raise typer.BadParameter(f"--concurrency {at_a_time} with --requests {count}: give as many at least")
    return LoadShape(count, at_a_time, rate)


def _figures(result: "LoadResult", ttft_slo_ms: float | None, tpot_slo_ms: float | None) -> dict[str, Any]:
    """Return what was measured, with the goodput if one of the limits is given."""
    figures = result.summary()
    if ttft_slo_ms is not None or tpot_slo_ms is not None:
        limits = {"ttft_slo_ms": ttft_slo_ms, "tpot_slo_ms": tpot_slo_ms}
        figures |= {**limits, "goodput": result.goodput(ttft_slo_ms, tpot_slo_ms)}
    return figures
