"""What becomes of many requests that come at once, and of the rooms and workers that serve them?

The client tells the answers; what went wrong behind them (rooms that failed, workers that were taken for
lost) is read off the bootstrap's own metrics, before and after. All of it is set beside the rate at which
the same stack answers such requests when so many as it likes are asked at a time.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from baton.cli.bench.counters import counted_since, counts
from baton.cli.bench.lengths import Lengths
from baton.cli.bench.load import LoadGenerator, LoadOutcome
from baton.cli.bench.probe import NotMeasurable, model_of, writer_for
from baton.cli.bench.stream_client import ServerAddress
from baton.cli.bench.workload import ApiEndpoint, ArrivalProcess, Workload, Writer, make_asks, schedule
from baton.runtime.serve import allow_open_files

WATCHED: Final = {
    "baton_rooms_failed_total": "rooms_failed",
    "baton_canaries_failed_total": "canaries_failed",
    "baton_request_retries_total": "retries",
    "baton_workers_lost_total": "workers_lost",
}
"""Counters of the bootstrap, each by what it is told as: all of them stand still where nothing fails."""
STATUS: Final = re.compile(r"HTTP (\d{3})")
FAILURES_TOLD: Final = 5
WARM_UP: Final = -2


@dataclass(frozen=True, slots=True)
class BurstPlan:
    sizes: Sequence[int]
    """Requests of each burst."""
    outputs: Sequence[int]
    """Tokens that requests ask for; bursts and flow come once for each."""
    prompt_tokens: Lengths
    rate: float
    """Requests a second of the steady flow; 0 for none."""
    seconds: float
    concurrency: int
    sustained: int
    """Requests by which the sustained rate is measured."""
    busy: int
    """Processes that compute beside it."""
    vocabulary: int
    seed: int
    timeout_s: float


async def measure(url: str, plan: BurstPlan) -> dict[str, Any]:
    """What `baton bench burst` prints. Raises NotMeasurable."""
    allow_open_files()
    server = ServerAddress.at(url)
    load = LoadGenerator(server, ApiEndpoint.COMPLETIONS.path, plan.timeout_s)
    try:
        model = model_of(server)
        with _beside(plan.busy):
            each = [await _of(load, server, plan, model, output) for output in plan.outputs]
    finally:
        load.close()
    loads = [one for told in each for one in told["loads"]]
    return {
        "model": model,
        "prompt_tokens": str(plan.prompt_tokens),
        "busy": plan.busy,
        "seed": plan.seed,
        "by_output_tokens": each,
        "ratio": max((one["ratio"] for one in loads), default=None),
        "all_answered": not any(one["failures"] for one in loads),
        "nothing_failed": not any(one[name] for one in loads for name in WATCHED.values()),
    }


async def _of(
    load: LoadGenerator, server: ServerAddress, plan: BurstPlan, model: str, output: int
) -> dict[str, Any]:
    workload = Workload(
        plan.prompt_tokens, Lengths.parse(str(output)), vocabulary=plan.vocabulary, seed=plan.seed
    )
    writer = await writer_for(load, workload, model, None)
    await load.closed(make_asks(workload, writer, plan.concurrency, WARM_UP), plan.concurrency)
    asks = make_asks(workload, writer, plan.sustained, 0)
    steady = await load.closed(asks, plan.concurrency)
    if len(steady.answers) < plan.sustained:
        raise NotMeasurable(f"{plan.concurrency} at a time were not all answered: {steady.failures[0]}")
    rate = plan.sustained / steady.wall_s
    loads = [
        await _burst(load, server, workload, writer, size, turn, rate)
        for turn, size in enumerate(plan.sizes, start=1)
    ]
    if plan.rate:
        loads.append(await _flow(load, server, workload, writer, plan, rate))
    return {"output_tokens": output, "sustained_requests_s": round(rate, 1), "loads": loads}


async def _burst(
    load: LoadGenerator,
    server: ServerAddress,
    workload: Workload,
    writer: Writer,
    size: int,
    turn: int,
    rate: float,
) -> dict[str, Any]:
    before = counts(server, WATCHED)
    outcome = await load.closed(make_asks(workload, writer, size, turn), size)
    return {"at_once": size, **_told(outcome, rate, before, counts(server, WATCHED))}


async def _flow(
    load: LoadGenerator,
    server: ServerAddress,
    workload: Workload,
    writer: Writer,
    plan: BurstPlan,
    rate: float,
) -> dict[str, Any]:
    count = round(plan.rate * plan.seconds)
    asks = make_asks(workload, writer, count, len(plan.sizes) + 1)
    before = counts(server, WATCHED)
    outcome = await load.open(schedule(asks, plan.rate, ArrivalProcess.FIXED, plan.seed, 0), count)
    told = _told(outcome, min(rate, plan.rate), before, counts(server, WATCHED))
    return {"a_second": plan.rate, "seconds": plan.seconds, **told}


def _told(
    outcome: LoadOutcome, rate: float, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any]:
    """A request that is refused with 429 is told apart: it is an answer past a stated bound."""
    statuses = Counter(_status(each) for each in outcome.failures)
    refused = statuses.pop("429", 0)
    answered = len(outcome.answers)
    others = sorted({each for each in outcome.failures if _status(each) != "429"})
    return {
        "answered": answered,
        "refused_429": refused,
        "failures": dict(statuses),
        "failures_told": others[:FAILURES_TOLD],
        "seconds": round(outcome.wall_s, 2),
        "ratio": round(outcome.wall_s * rate / answered, 2) if answered else None,
        **dict.fromkeys(WATCHED.values(), 0),
        **counted_since(before, after),
    }


def _status(failure: str) -> str:
    match = STATUS.match(failure)
    return match[1] if match else "no answer"


@contextmanager
def _beside(count: int) -> Iterator[None]:
    """So many processes that take what they get of the cores."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
