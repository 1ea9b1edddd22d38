"""Bursts of requests, a steady flow, and what failed behind their answers.

Failed rooms, retries and lost workers are read off the bootstrap's counters before and after. The times are
set beside the rate at which the same stack answers such requests a fixed number at a time.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx

from baton.cli.load_benchmark import NotMeasurable, Workload, find_model
from baton.cli.load_client import LoadResult, connect, run_load
from baton.runtime.service_process import raise_open_file_limit
from bench.serving.counters import counts, increases

WATCHED: Final = {
    "baton_rooms_failed_total": "rooms_failed",
    "baton_canaries_failed_total": "canaries_failed",
    "baton_request_retries_total": "retries",
    "baton_workers_lost_total": "workers_lost",
}
"""Counters of the bootstrap that do not rise while nothing fails, each with its name in the result."""
STATUS: Final = re.compile(r"HTTP (\d{3})")
FAILURES_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class BurstPlan:
    """Sizes and rates of one run."""

    sizes: Sequence[int]
    """Requests of each burst."""
    outputs: Sequence[int]
    """Output tokens of a request. All bursts and the flow run once for each."""
    prompt_tokens: int
    rate: float
    """Requests a second of the steady flow; 0 for none."""
    seconds: float
    concurrency: int
    sustained: int
    """Requests by which the sustained rate is measured."""
    busy: int
    """Processes that compute beside the stack."""
    vocabulary: int
    seed: int
    timeout_s: float


class _Bursts:
    """Bursts of requests of one output length."""

    def __init__(self, client: httpx.AsyncClient, plan: BurstPlan, model: str, output_tokens: int) -> None:
        self._client = client
        self._plan = plan
        self._model = model
        self._workload = Workload(
            plan.prompt_tokens, output_tokens, vocabulary=plan.vocabulary, seed=plan.seed
        )

    async def measure(self) -> dict[str, Any]:
        plan = self._plan
        await self._load("warm-up", plan.concurrency, plan.concurrency)
        steady = await self._load("sustained", plan.sustained, plan.concurrency)
        if len(steady.answers) < plan.sustained:
            raise NotMeasurable(f"{plan.concurrency} at a time were not all answered: {steady.failures[0]}")
        rate = plan.sustained / steady.wall_s
        loads = [
            {"at_once": size, **await self._watched(f"burst {index}", size, rate)}
            for index, size in enumerate(plan.sizes)
        ]
        if plan.rate:
            count = round(plan.rate * plan.seconds)
            flow = await self._watched("flow", count, min(rate, plan.rate), plan.rate)
            loads.append({"a_second": plan.rate, "seconds": plan.seconds, **flow})
        sustained = {"output_tokens": self._workload.output_tokens, "sustained_requests_s": round(rate, 1)}
        return {**sustained, "loads": loads}

    async def _load(
        self, run: str, count: int, concurrency: int, arrivals: float | None = None
    ) -> LoadResult:
        """Send `count` requests. `arrivals`: requests a second, without bound if None."""
        bodies = self._workload.bodies(self._model, count, run)
        path = self._workload.endpoint.path
        return await run_load(self._client, path, bodies, concurrency, self._plan.timeout_s, arrivals)

    async def _watched(
        self, run: str, count: int, rate: float, arrivals: float | None = None
    ) -> dict[str, Any]:
        url = str(self._client.base_url).rstrip("/")
        before = counts(url, WATCHED)
        result = await self._load(run, count, count, arrivals)
        return _summary(result, rate, before, counts(url, WATCHED))


async def measure(url: str, plan: BurstPlan) -> dict[str, Any]:
    """Return what `python -m bench burst` prints. Raises NotMeasurable."""
    raise_open_file_limit()
    async with connect(url, timeout_s=plan.timeout_s) as client:
        model = await find_model(client)
        with _busy_processes(plan.busy):
            each = [await _Bursts(client, plan, model, output).measure() for output in plan.outputs]
    loads = [one for by_output in each for one in by_output["loads"]]
    return {
        "model": model,
        "prompt_tokens": plan.prompt_tokens,
        "busy": plan.busy,
        "seed": plan.seed,
        "by_output_tokens": each,
        "ratio": max((one["ratio"] for one in loads), default=None),
        "all_answered": not any(one["failures"] for one in loads),
        "nothing_failed": not any(one[name] for one in loads for name in WATCHED.values()),
    }


def _summary(
    result: LoadResult, rate: float, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of one burst. A 429 is not a failure, but the answer beyond a documented limit."""
    statuses = Counter(_status(each) for each in result.failures)
    refused = statuses.pop("429", 0)
    answered = len(result.answers)
    messages = sorted({each for each in result.failures if _status(each) != "429"})
    return {
        "answered": answered,
        "refused_429": refused,
        "failures": dict(statuses),
        "failure_messages": messages[:FAILURES_MAX],
        "seconds": round(result.wall_s, 2),
        "ratio": round(result.wall_s * rate / answered, 2) if answered else None,
        **dict.fromkeys(WATCHED.values(), 0),
        **increases(before, after),
    }


def _status(failure: str) -> str:
    match = STATUS.match(failure)
    return match[1] if match else "no answer"


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that compute without a pause."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
