"""Chats without an end on a KV cache that holds all of them, and on smaller ones.

Each stack is started, asked once and ended. The number of running sequences is read off the bootstrap
meanwhile. Demand is the time in which more chats are open than run.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import uvloop

from baton.cli.load_benchmark import WORDS, ApiEndpoint, NotMeasurable, find_model
from baton.cli.load_client import RequestFailed, Response, connect, parse_answer, percentiles_ms, post
from baton.rooms.phases import Side
from baton.rooms.queues import RoomQueue
from baton.runtime.service_process import raise_open_file_limit
from bench.serving.counters import counts, increases
from bench.serving.stack import running

Log = Callable[[str], None]
WHOLE, DEFAULT, QUARTER = "whole", "default", "quarter"
CACHES: Final = (DEFAULT, WHOLE, QUARTER)
"""Caches in the order of their runs. The first run shows how many bytes a token takes."""
SPARE: Final = 1.1
"""Size of the whole cache over the chats' own pages, for partly filled and cached pages."""
LOOK_S: Final = 0.5
WATCHED: Final = {
    "baton_rooms_failed_total": "rooms_failed",
    "baton_request_retries_total": "retries",
    "baton_rooms_retracted_total": "retractions",
    "baton_retraction_recomputed_tokens_total": "recomputed_tokens",
    "baton_retraction_pause_seconds_sum": "paused_s",
}
FAILURES_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """Chats and caches of one run."""

    chats: int
    context_tokens: int
    """Tokens at which each chat ends."""
    cache_bytes: int
    """KV cache of the default stack."""
    prompt_tokens: tuple[int, int]
    """Shortest and longest prompt."""
    dtype: str
    alone: int
    """Chats that are repeated one at a time on the whole cache."""
    only: tuple[str, ...]
    """Names of caches. Empty: all of them."""
    flags: str
    seed: int
    timeout_s: float

    def __post_init__(self) -> None:
        unknown = set(self.only).difference(CACHES)
        if unknown:
            raise ValueError(f"--only {min(unknown)}: it has to be some of {', '.join(CACHES)}")
        if self.only and DEFAULT not in self.only:
            raise ValueError(f"--only: {DEFAULT} has to be among them")
        if self.prompt_tokens[1] > self.context_tokens // 2:
            raise ValueError("--prompt-tokens: a chat's prompt has at most half of --context-length")

    def bodies(self, model: str) -> list[bytes]:
        """Return greedy and seeded requests in turn, all different."""
        rng = random.Random(f"{self.seed} chats")  # noqa: S311
        bodies = []
        for place in range(self.chats):
            text = " ".join(rng.choices(WORDS, k=rng.randint(*self.prompt_tokens)))
            reports: dict[str, Any] = {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "temperature": place % 2,
                "seed": place,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
            bodies.append(json.dumps(reports).encode())
        return bodies

    def flags_of(self, cache_bytes: int) -> str:
        """Return flags of `baton serve`. Time-outs are long, so that all chats have answers to compare."""
        sizes = f"--context-length {self.context_tokens} --dtype {self.dtype} --kv-cache-memory {cache_bytes}"
        waits = f"--queue-timeout-ms {self.timeout_s:.0f}s --request-timeout-ms {self.timeout_s:.0f}s"
        return f"{sizes} {waits} {self.flags}"


@dataclass(slots=True)
class Chat:
    """Result of one chat."""

    ids: tuple[int, ...] = ()
    failure: str = ""
    status: str = "no answer"
    ttft_s: float = 0.0
    longest_gap_s: float = 0.0


@dataclass(slots=True)
class Watch:
    """Samples taken while chats are open."""

    samples: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of open chats and running sequences."""

    def summary(self) -> dict[str, Any]:
        """Return how many samples saw demand, and how many sequences ran in these."""
        demand = sorted(ran for chats, ran in self.samples if ran < chats)
        if not demand:
            return {}
        ranks = {name: demand[int(share * (len(demand) - 1))] for name, share in (("p10", 0.1), ("p50", 0.5))}
        mean = round(sum(demand) / len(demand), 1)
        return {"looks": len(demand), "mean": mean, **ranks, "max": demand[-1]}


def measure(plan: GrowthPlan, log: Log) -> dict[str, Any]:
    """Return what `python -m bench growth` prints. Raises StartupError."""
    raise_open_file_limit()
    reports: dict[str, Any] = {}
    answers: dict[str, list[Chat]] = {}
    sizes = {DEFAULT: plan.cache_bytes, QUARTER: plan.cache_bytes // 4}
    for cache in CACHES:
        if plan.only and cache not in plan.only:
            continue
        if cache == WHOLE:
            of_a_token = plan.cache_bytes / reports[DEFAULT]["cache_tokens"]
            sizes[WHOLE] = round(SPARE * plan.chats * plan.context_tokens * of_a_token)
        with running("", plan.flags_of(sizes[cache])) as url:
            again = plan.alone if cache == WHOLE else 0
            answers[cache], reports[cache] = uvloop.run(_run_chats(url, plan, again))
        log(f"{cache}: {json.dumps(reports[cache])}")
    for cache in reports if WHOLE in reports else ():
        rates = [reports[each]["output_tokens_per_s"] for each in (cache, WHOLE)]
        reports[cache]["ratio"] = round(rates[0] / rates[1], 3) if rates[1] else None
        pairs = zip(answers[cache], answers[WHOLE], strict=True)
        reports[cache]["equal"] = sum(bool(one.ids) and one.ids == other.ids for one, other in pairs)
    return {
        "chats": plan.chats,
        "context_tokens": plan.context_tokens,
        "dtype": plan.dtype,
        "prompt_tokens": str(plan.prompt_tokens),
        "flags": plan.flags,
        "seed": plan.seed,
        "caches": reports,
        "ratio": reports[DEFAULT].get("ratio") if DEFAULT in reports else None,
    }


async def _run_chats(url: str, plan: GrowthPlan, again: int) -> tuple[list[Chat], dict[str, Any]]:
    """Run all chats at once, then the first `again` of them one at a time."""
    async with connect(url, timeout_s=plan.timeout_s) as client:
        bodies = plan.bodies(await find_model(client))

        async def send(body: bytes) -> Response | str:
            try:
                return await post(client, ApiEndpoint.CHAT.path, body, plan.timeout_s)
            except RequestFailed as error:
                return str(error)

        await send(_short(bodies[0]))
        before, tokens = counts(url, WATCHED), _positions(url)
        open_chats, watch = Counter(chats=plan.chats), Watch()
        watching = asyncio.create_task(_look(url, open_chats, watch))

        async def run_chat(body: bytes) -> Response | str:
            try:
                return await send(body)
            finally:
                open_chats["chats"] -= 1

        start, cpu = time.perf_counter(), time.process_time()
        responses = await asyncio.gather(*map(run_chat, bodies))
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        after = counts(url, WATCHED)
        chats = [chat_of(each) for each in responses]
        alone = [chat_of(await send(body)) for body in bodies[:again]]
    drawn = sum(len(each.ids) for each in chats)
    figures = {
        "cache_tokens": tokens,
        "statuses": dict(Counter(each.status for each in chats)),
        "failures": sorted({each.failure for each in chats if each.failure})[:FAILURES_MAX],
        "seconds": round(wall_s, 1),
        "output_tokens": drawn,
        "output_tokens_per_s": round(drawn / wall_s, 1),
        "running_while_others_wait": watch.summary(),
        "ttft_ms": percentiles_ms([each.ttft_s for each in chats if each.ids]),
        "longest_gap_ms": percentiles_ms([each.longest_gap_s for each in chats if each.ids]),
        "client_cpu_share": round(cpu_s / wall_s, 3),
        **increases(before, after),
    }
    if again:
        same = sum(one.ids == other.ids for one, other in zip(alone, chats, strict=False))
        figures["equal_alone"] = f"{same} of {again}"
    return chats, figures


async def _look(url: str, open_chats: Mapping[str, int], watch: Watch) -> None:
    """Take samples until cancelled."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        while True:
            with suppress(httpx.HTTPError):
                watch.samples.append((open_chats["chats"], _running((await http.get("/workers")).json())))
            await asyncio.sleep(LOOK_S)


def _running(page: Mapping[str, Any]) -> int:
    """Return how many sequences run on decode workers, from the page /workers."""
    return sum(each["queues"].get(RoomQueue.RUNNING, 0) for each in _decode(page))


def _decode(page: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [each for each in page["workers"] if each["side"] == Side.DECODE.value]


def _positions(url: str) -> int:
    """Return the capacity of all decode workers' caches in tokens. Raises NotMeasurable."""
    try:
        page = httpx.get(f"{url}/workers", trust_env=False).json()
    except (httpx.HTTPError, ValueError) as error:
        raise NotMeasurable(f"{url}/workers cannot be read: {error}") from None
    return sum(each["tokens_max"] for each in _decode(page))


def _short(body: bytes) -> bytes:
    """Return the same chat with a short answer, for a first request that is not measured."""
    return json.dumps(json.loads(body) | {"max_tokens": 2}).encode()


def chat_of(response: Response | str) -> Chat:
    """Return a chat's result. A text is the reason why there is no response."""
    if isinstance(response, str):
        return Chat(failure=response)
    status = str(response.status)
    try:
        answer = parse_answer(response)
    except RequestFailed as error:
        return Chat(failure=str(error), status="broken" if response.status == httpx.codes.OK else status)
    ids: list[int] = []
    for line in response.body.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                ids += choice.get("token_ids") or ()
    return Chat(tuple(ids), "", status, answer.ttft_s, max(answer.gaps_s, default=0.0))
