"""Command `baton bench serve`, which measures latency and throughput of a running server."""

import json
from typing import Annotated

import typer

from baton.launch.serve_settings import DEFAULT_URL
from baton.runtime.errors import StartupError
from baton.runtime.service_process import raise_open_file_limit, report_startup_error

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
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests at a time.")] = 4,
    requests: Annotated[
        int, typer.Option(min=0, max=100_000, help="0: 32, or four for each at a time, if that is more.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="The same seed sends the same requests.")] = 0,
) -> None:
    """Measure time to the first token, gaps between tokens and tokens a second. Print one JSON object."""
    import uvloop

    from baton.cli.load_benchmark import ApiEndpoint, Workload, measure
    from baton.cli.load_client import connect

    count = requests or max(32, 4 * concurrency)
    if count < concurrency:
        raise typer.BadParameter(
            f"--concurrency {concurrency} with --requests {count}: give as many at least"
        )

    async def run() -> None:
        async with client:
            settings, result = await measure(client, workload, count, concurrency, model=model)
        print(json.dumps({"benchmark": "serve", **settings, **result.summary()}))

    try:
        kind = ApiEndpoint(endpoint)
        workload = Workload(
            prompt_tokens, output_tokens, kind, shared_prefix, ignore_eos=ignore_eos, seed=seed
        )
        client = connect(url, api_key)
        raise_open_file_limit()
        uvloop.run(run())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except StartupError as error:
        raise typer.Exit(report_startup_error(error)) from None
