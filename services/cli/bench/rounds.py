"""How are systems measured side by side on cores that hold one at a time? In turns, all in every round."""

import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import uvloop

from services.cli.bench.comparison import LoadSpec
from services.cli.bench.latencies import Objective
from services.cli.bench.lengths import Lengths
from services.cli.bench.stream_client import ServerAddress
from services.cli.bench.systems import System
from services.cli.bench.trial import Closed, Trial
from services.cli.bench.workload import Workload

Say = Callable[[str], None]

Measured = dict[str, dict[int, list[dict[str, Any]]]]
"""By system and concurrency, one summary a round."""


def workload_of(load: LoadSpec) -> Workload:
    """Raises ValueError."""
    return Workload(
        Lengths.parse(load.prompt_tokens),
        Lengths.parse(load.output_tokens),
        load.shared_prefix,
        vocabulary=load.vocabulary,
        seed=load.seed,
    )


def measure_in_turns(systems: Sequence[System], load: LoadSpec, say: Say) -> Measured:
    """Start all, one after the other, and measure; end all, whatever happens. Raises StartupError.

    Between its turns a system is stopped where it is, and takes no core.
    """
    measured: Measured = {
        each.spec.name: {concurrency: [] for concurrency in load.concurrency} for each in systems
    }
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        for system in systems:
            say(f"starting {system.spec.name}")
            system.start()
            uvloop.run(_turn(system, load, -1))
            system.rest()
        for number in range(load.rounds):
            for system in systems:
                system.go_on()
                told = uvloop.run(_turn(system, load, number))
                system.rest()
                for concurrency, summary in told.items():
                    measured[system.spec.name][concurrency].append(summary)
                    say(
                        f"round {number + 1}/{load.rounds}, {system.spec.name}: {_line(concurrency, summary)}"
                    )
    finally:
        for system in systems:
            system.end()
        signal.signal(signal.SIGTERM, before)
    return measured


async def _turn(system: System, load: LoadSpec, number: int) -> dict[int, dict[str, Any]]:
    """One round of one system; before the first (-1) only its warm-up, at the highest concurrency."""
    server = ServerAddress.at(system.spec.url)
    trial = await Trial.begin(server, workload_of(load), prompts=load.prompts, timeout_s=load.timeout_s)
    try:
        widest = max(load.concurrency)
        await trial.warm_up(max(load.warm_up, widest if number < 0 else 0), widest)
        if number < 0:
            return {}
        return {
            concurrency: await trial.round(
                Closed(concurrency), requests, number * 10_000 + concurrency, Objective()
            )
            for concurrency, requests in zip(load.concurrency, load.requests, strict=True)
        }
    finally:
        trial.close()


def _line(concurrency: int, told: dict[str, Any]) -> str:
    ttft, tpot = told["ttft_ms"]["p50"], told["tpot_ms"].get("p50", 0)
    return (
        f"{concurrency} at a time: TTFT {ttft:.0f} ms, TPOT {tpot:.1f} ms, "
        f"{told['output_tokens_per_s']:.0f} tokens/s"
        + (f", {told['failed']} failed" if told["failed"] else "")
    )


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
