"""The command `router`: bootstraps on one core, before workers that answer at once.

The client and the workers run on another core. The requests per second depend on that core, too. The
requests per CPU second of a bootstrap do not. Each of several bootstraps gets the whole load. Only the first
has a core of its own, so `per_cpu_s` is what that one did in a CPU second, times the number of bootstraps.
"""

import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from bench.report import AsJson, Runs

CONCURRENCIES: Final = (1, 16, 64)
TICKS_S: Final = 1 / os.sysconf("SC_CLK_TCK")

Model = Annotated[str, typer.Option(help="Whose tokenizer and template: a directory, a file, or demo.")]


def router(
    runs: Runs = 5,
    model: Model = "demo",
    requests: Annotated[int, typer.Option(min=64, help="Whole replies in one measurement.")] = 2000,
    streams: Annotated[int, typer.Option(min=64, help="Streamed replies in one measurement.")] = 320,
    tokens: Annotated[int, typer.Option(min=1, max=1024, help="Output tokens of a streamed reply.")] = 64,
    routers: Annotated[
        int, typer.Option(min=1, max=16, help="Bootstraps that share the workers. Each gets the load.")
    ] = 1,
    _: AsJson = True,
) -> None:
    """Requests and streamed tokens a second, and the latency that the router adds."""
    import uvloop

    from baton.models.model_files import prepare, resolve
    from baton.runtime.cpu_affinity import allowed_cpus
    from baton.runtime.errors import StartupError
    from baton.runtime.service_process import report_startup_error
    from bench.router.router_stack import RouterStack

    directory = prepare(resolve(model), lambda _: None)
    cores = allowed_cpus()

    async def measure() -> dict[str, Any]:
        async with RouterStack(directory, cores[0], routers) as stack:
            os.sched_setaffinity(0, {cores[-1]})
            rounds = [await one_round(stack, requests, streams, tokens) for _ in range(runs)]
        sizes = {"runs": runs, "cores": len(cores), "routers": routers}
        return {"benchmark": "router", **sizes, **merged(rounds)}

    try:
        print(json.dumps(uvloop.run(measure())))
    except StartupError as error:
        raise typer.Exit(report_startup_error(error)) from None


async def one_round(stack: Any, requests: int, streams: int, tokens: int) -> dict[str, float]:
    """Take every measurement once."""
    from bench.router.router_load import body_of, run_load

    found: dict[str, float] = {}
    routers = len(stack.http_ports)
    prompt = "What is the capital of France, and which river flows through it?"
    whole = body_of(stack.model, prompt, 16, 16, stream=False)
    each = body_of(stack.model, prompt, tokens, 1, stream=True)
    eight = body_of(stack.model, prompt, tokens, 8, stream=True)

    async def load(name: str, body: bytes, concurrency: int, count: int, worth: int) -> None:
        before = cpu_s(stack.bootstrap_pid)
        result = await run_load(stack.http_ports, body, concurrency * routers, count * routers)
        spent_s = cpu_s(stack.bootstrap_pid) - before
        found[f"{name}_per_s"] = worth * count * routers / result.seconds
        found[f"{name}_per_cpu_s"] = worth * count * routers / max(spent_s, TICKS_S)
        found[f"{name}_core_share"] = spent_s / result.seconds
        found[f"{name}_latency_ms"] = 1000 * statistics.median(result.latencies_s)

    for concurrency in CONCURRENCIES:
        share = max(requests * min(concurrency, 4) // 4, 32)
        await load(f"requests_c{concurrency}", whole, concurrency, share, 1)
        share = max(streams * min(concurrency, 4) // 4, 16)
        await load(f"tokens_c{concurrency}", each, concurrency, share, tokens)
        await load(f"tokens_by_8_c{concurrency}", eight, concurrency, share, tokens)
    found["direct_latency_ms"] = 1000 * statistics.median(
        [await stack.ask_directly(16) for _ in range(max(requests // 8, 32))]
    )
    found["added_latency_ms"] = found["requests_c1_latency_ms"] - found["direct_latency_ms"]
    return found


def merged(rounds: list[dict[str, float]]) -> dict[str, object]:
    """Return medians over the rounds, grouped for the output."""
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    kinds: dict[str, Callable[[str], bool]] = {
        "requests": lambda name: name.startswith("requests_c"),
        "tokens": lambda name: name.startswith("tokens_c"),
        "tokens_by_8": lambda name: name.startswith("tokens_by_8_c"),
    }
    body: dict[str, object] = {}
    for kind, belongs in kinds.items():
        rows: dict[str, dict[str, float]] = {}
        for name in filter(belongs, medians):
            concurrency, _, what = name.removeprefix(f"{kind}_c").partition("_")
            rows.setdefault(concurrency, {})[what] = round(medians[name], 3 if medians[name] < 100 else None)
        body[kind] = rows
    for name in ("direct_latency_ms", "added_latency_ms"):
        body[name] = round(medians[name], 3)
    body["ratio"] = round(medians["requests_c1_latency_ms"] / medians["direct_latency_ms"], 3)
    body["ratio_of"] = ["through the router", "directly"]
    return body


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICKS_S
