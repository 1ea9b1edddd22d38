"""How are systems measured side by side on cores that hold one at a time? In turns, all in every round."""

import signal
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Final

import uvloop

from baton.cli.bench.load_specs import Level, PlannedClosed, PlannedLoad, PlannedTrace
from baton.cli.bench.measures import OUTPUT, Measure, Summary
from baton.cli.bench.replay import measure as measure_replay
from baton.cli.bench.stream_client import ServerAddress
from baton.cli.bench.systems import System
from baton.cli.bench.trial import Closed, Trial
from baton.cli.bench.workload import ApiEndpoint

Say = Callable[[str], None]

Measured = Mapping[str, Mapping[Level, Sequence[Summary]]]
"""By system and level, one summary a round."""

SAID: Final = (Measure("ttft_ms.p50", "TTFT", "ms"), Measure("tpot_ms.p50", "TPOT", "ms"), OUTPUT)


def measure_in_turns(systems: Sequence[System], loads: Sequence[PlannedLoad], say: Say) -> Measured:
    """Start all, one after the other, and measure; end all, whatever happens. Raises StartupError.

    Between its turns a system is stopped where it is, and takes no core. Each round begins with another
    one, so that none is always measured first.
    """
    measured: dict[str, dict[Level, list[Summary]]] = {
        each.spec.name: {level: [] for load in loads for level in load.spec.levels} for each in systems
    }
    rounds = max(load.spec.rounds for load in loads)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        for system in systems:
            say(f"starting {system.spec.name}")
            system.start()
            uvloop.run(_widest(system, loads))
            system.rest()
        for number in range(rounds):
            first = number % len(systems)
            for system in (*systems[first:], *systems[:first]):
                system.go_on()
                for load in loads:
                    if number >= load.spec.rounds:
                        continue
                    for level, summary in uvloop.run(_turn(system, load, number)).items():
                        measured[system.spec.name][level].append(summary)
                        say(f"round {number + 1}/{rounds}, {system.spec.name}: {_line(level, summary)}")
                system.rest()
    finally:
        for system in systems:
            system.end()
        signal.signal(signal.SIGTERM, before)
    return measured


async def _widest(system: System, loads: Sequence[PlannedLoad]) -> None:
    """Before the first round: what is asked at a time at most, of the closed load that is the widest."""
    closed = [load for load in loads if isinstance(load, PlannedClosed)]
    if closed:
        await _closed(system, max(closed, key=lambda load: max(load.spec.concurrency)), None)


async def _turn(system: System, load: PlannedLoad, number: int) -> dict[Level, Summary]:
    """One round of one system."""
    if isinstance(load, PlannedClosed):
        return await _closed(system, load, number)
    return await _replayed(system, load, number)


async def _closed(system: System, load: PlannedClosed, number: int | None) -> dict[Level, Summary]:
    """Without a number only the warm-up, at the highest concurrency."""
    spec, widest = load.spec, max(load.spec.concurrency)
    server = ServerAddress.at(system.spec.url)
    trial = await Trial.begin(server, load.workload, prompts=spec.prompts, timeout_s=spec.timeout_s)
    try:
        await trial.warm_up(max(spec.warm_up, widest if number is None else 0), widest)
        if number is None:
            return {}
        return {
            level: await trial.round(
                Closed(concurrency), requests, number * 10_000 + concurrency, spec.objective
            )
            for level, concurrency, requests in zip(spec.levels, spec.concurrency, spec.requests, strict=True)
        }
    finally:
        trial.close()


async def _replayed(system: System, load: PlannedTrace, number: int) -> dict[Level, Summary]:
    told = await measure_replay(
        ServerAddress.at(system.spec.url),
        load.of_round(number),
        load.spec.objective,
        endpoint=ApiEndpoint.COMPLETIONS,
        model="",
        prompts=load.spec.prompts,
        ignore_eos=True,
    )
    return dict.fromkeys(load.spec.levels, told)


def _line(level: Level, told: Summary) -> str:
    figures = (
        f"{measure.title} {value:.4g} {measure.unit}"
        for measure in SAID
        if (value := measure.of(told)) is not None
    )
    counted = (f"{told[name]} {name}" for name in ("refused", "failed") if told[name])
    return f"{level.told}: {', '.join((*figures, *counted))}"


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
