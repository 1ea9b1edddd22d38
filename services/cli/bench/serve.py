"""How soon does a server answer, and how steadily? Any server that speaks the OpenAI API."""

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from baton.cli.bench.report import AsJson
from baton.cli.bench.workload import IN_FLIGHT_MAX, ApiEndpoint, ArrivalProcess, PromptForm
from baton.cli.chat_settings import DEFAULT_URL
from baton.runtime.errors import StartupError
from baton.runtime.serve import tell

REQUESTS_MIN: Final = 32
CONCURRENCY: Final = 4

OF_A_TRACE: Final = frozenset({"time_scale", "length_scale", "tokens_max", "priorities", "obey_retry_after"})
BY_A_TRACE: Final = frozenset(
    {"prompt_tokens", "output_tokens", "shared_prefix", "prefixes"}
    | {"concurrency", "rate", "arrivals", "repeats"}
)
"""What a trace says itself."""

Milliseconds = Annotated[float | None, typer.Option(min=0, help="For goodput; default: no limit.")]


def serve(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="Where the server is, with or without /v1.")] = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="Default: the first that the server lists.")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = "",
    endpoint: Annotated[ApiEndpoint, typer.Option(help="Which API is asked.")] = ApiEndpoint.COMPLETIONS,
    prompts: Annotated[
        PromptForm | None, typer.Option(help="Default: token ids where the server takes them, else text.")
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="512, 128-1024, or 128@3,1024 (three to one).")] = "512",
    output_tokens: Annotated[str, typer.Option(help="As --prompt-tokens.")] = "64",
    ignore_eos: Annotated[bool, typer.Option(help="Ask for all of --output-tokens.")] = True,
    shared_prefix: Annotated[float, typer.Option(min=0, max=1, help="Share of a prompt common to all.")] = 0,
    prefixes: Annotated[int, typer.Option(min=1, max=10_000, help="Different common prefixes.")] = 1,
    vocabulary: Annotated[int, typer.Option(min=200, help="Token ids drawn are below this.")] = 32_000,
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=4096, help=f"Requests at a time; default: {CONCURRENCY}.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, max=1_000_000, help="Requests a second, in place of --concurrency."),
    ] = None,
    arrivals: Annotated[
        ArrivalProcess | None, typer.Option(help="How they come with --rate; default: poisson.")
    ] = None,
    in_flight_max: Annotated[
        int | None,
        typer.Option(
            min=1, max=65_536, help=f"Most at a time with --rate or --trace; default: {IN_FLIGHT_MAX}."
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Ask what it says, when it says: Mooncake's JSON or Azure's CSV.")
    ] = None,
    time_scale: Annotated[
        float, typer.Option(min=0, max=1000, help="Of a trace's times: 0.5 is twice as fast.")
    ] = 1,
    length_scale: Annotated[float, typer.Option(min=0, max=1000, help="Of a trace's lengths.")] = 1,
    tokens_max: Annotated[
        int | None, typer.Option(min=2, help="Of a trace's request; a longer one is shortened.")
    ] = None,
    priorities: Annotated[
        str, typer.Option(help="Of a trace's requests: 0,10 or 0@3,10 (three to one); lower is earlier.")
    ] = "",
    obey_retry_after: Annotated[
        bool, typer.Option(help="Ask again what a server refused with 429 or 503, when it says.")
    ] = True,
    requests: Annotated[
        int,
        typer.Option(
            min=0,
            max=100_000,
            help="Of one repeat; 0: 32, or four for each at a time, or all of a trace.",
        ),
    ] = 0,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Medians are over these.")] = 5,
    warm_up: Annotated[int, typer.Option(min=0, max=1000, help="Requests before, not measured.")] = 4,
    ttft_slo_ms: Milliseconds = None,
    tpot_slo_ms: Milliseconds = None,
    itl_slo_ms: Milliseconds = None,
    seed: Annotated[int, typer.Option(help="The same seed asks the same.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest a request may take.")] = 600,
    _: AsJson = True,
) -> None:
    """First token, time per token, gaps, tokens a second, goodput; of any OpenAI-compatible server."""
    import uvloop

    from baton.cli.bench.latencies import Objective
    from baton.cli.bench.lengths import Lengths
    from baton.cli.bench.replay import ReplayPlan, parse_classes
    from baton.cli.bench.replay import measure as measure_replay
    from baton.cli.bench.stream_client import ServerAddress
    from baton.cli.bench.traces import read_trace, replayed
    from baton.cli.bench.trial import Closed, Open, measure
    from baton.cli.bench.workload import Workload

    _check_options(context, trace)
    objective = Objective(ttft_slo_ms, tpot_slo_ms, itl_slo_ms)
    try:
        server = ServerAddress.at(url, api_key)
        lengths = Lengths.parse(prompt_tokens), Lengths.parse(output_tokens)
        classes = parse_classes(priorities)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if trace is not None:
        try:
            replay = replayed(read_trace(trace, requests or None), time_scale, length_scale, tokens_max)
            in_flight = in_flight_max or IN_FLIGHT_MAX
            plan = ReplayPlan(
                replay, in_flight, obey_retry_after, classes, warm_up, vocabulary, seed, timeout_s
            )
            replaying = measure_replay(
                server,
                plan,
                objective,
                endpoint=endpoint,
                model=model,
                prompts=prompts,
                ignore_eos=ignore_eos,
            )
            told = uvloop.run(replaying)
        except StartupError as error:
            raise typer.Exit(tell(error)) from None
        scales = {"time_scale": time_scale, "length_scale": length_scale, "tokens_max": tokens_max}
        print(json.dumps({"benchmark": "serve", "trace": trace.name, **scales, **told}))
        return
    pace: Closed | Open
    if rate is None:
        if arrivals is not None or in_flight_max is not None:
            raise typer.BadParameter("--arrivals and --in-flight-max are of a --rate: give one")
        pace = Closed(concurrency or CONCURRENCY)
        asks = requests or max(REQUESTS_MIN, 4 * pace.concurrency)
        if asks < pace.concurrency:
            raise typer.BadParameter(
                f"--concurrency {pace.concurrency} of --requests {requests}: give as many at least"
            )
    else:
        if concurrency is not None:
            raise typer.BadParameter("--rate and --concurrency: give one of them")
        pace = Open(rate, arrivals or ArrivalProcess.POISSON, in_flight_max or IN_FLIGHT_MAX)
        asks = requests or REQUESTS_MIN
    measuring = measure(
        server,
        Workload(*lengths, shared_prefix, prefixes, vocabulary, seed, endpoint),
        pace,
        objective,
        requests=asks,
        repeats=repeats,
        warm_up=warm_up,
        model=model,
        prompts=prompts,
        ignore_eos=ignore_eos,
        timeout_s=timeout_s,
    )
    try:
        print(json.dumps(uvloop.run(measuring)))
    except StartupError as error:
        raise typer.Exit(tell(error)) from None


def _check_options(context: typer.Context, trace: Path | None) -> None:
    """Raise BadParameter for an option that means nothing beside the others."""
    for name in sorted(OF_A_TRACE if trace is None else BY_A_TRACE):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            why = "is of a --trace: give one" if trace is None else "is what a --trace says"
            raise typer.BadParameter(f"{flag} {why}")
