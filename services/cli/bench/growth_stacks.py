"""How do chats without an end fare on a cache that holds all of them, and on smaller ones?

Each stack is started anew, asked once and ended. What runs on its decode workers is read off the bootstrap
meanwhile; *demand* is while more chats go on than run.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import uvloop

from baton.cli.bench.answers import AnswerFailed, understand
from baton.cli.bench.counters import counted_since, counts
from baton.cli.bench.handover_stack import running
from baton.cli.bench.latencies import spread
from baton.cli.bench.lengths import Lengths
from baton.cli.bench.load import undisturbed
from baton.cli.bench.probe import NotMeasurable, model_of
from baton.cli.bench.rounds import Say
from baton.cli.bench.stream_client import ConnectionPool, Reply, ServerAddress, ServerBroke
from baton.cli.bench.workload import WORDS, ApiEndpoint
from baton.rooms.phases import Side
from baton.rooms.queues import RoomQueue
from baton.runtime.serve import allow_open_files

WHOLE, DEFAULT, QUARTER = "whole", "default", "quarter"
CACHES: Final = (DEFAULT, WHOLE, QUARTER)
"""In the order in which they are asked: the first tells how many bytes a token takes."""
SPARE: Final = 1.1
"""Of what all chats come to take: pages are whole, and some hold what nobody reads any more."""
LOOK_S: Final = 0.5
WATCHED: Final = {
    "baton_rooms_failed_total": "rooms_failed",
    "baton_request_retries_total": "retries",
    "baton_rooms_retracted_total": "retractions",
    "baton_retraction_recomputed_tokens_total": "recomputed_tokens",
    "baton_retraction_pause_seconds_sum": "paused_s",
}
FAILURES_TOLD: Final = 5


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    chats: int
    context_tokens: int
    """Of one chat, to which it goes on."""
    cache_bytes: int
    """Of the stack that is judged, for KV pages."""
    prompt_tokens: Lengths
    dtype: str
    alone: int
    """Chats that are asked again, one at a time, where the cache holds everything."""
    only: tuple[str, ...]
    """Caches; none: all of them."""
    flags: str
    seed: int
    timeout_s: float

    def __post_init__(self) -> None:
        unknown = set(self.only).difference(CACHES)
        if unknown:
            raise ValueError(f"--only {min(unknown)}: it has to be some of {', '.join(CACHES)}")
        if self.only and DEFAULT not in self.only:
            raise ValueError(f"--only: {DEFAULT} has to be among them")
        if self.prompt_tokens.longest > self.context_tokens // 2:
            raise ValueError("--prompt-tokens: a chat's prompt has at most half of --context-length")

    def bodies(self, model: str) -> list[bytes]:
        """Greedy and seeded ones in turn, none like another."""
        rng = random.Random(f"{self.seed} chats")  # noqa: S311
        bodies = []
        for place in range(self.chats):
            text = " ".join(rng.choices(WORDS, k=self.prompt_tokens.draw(rng)))
            told: dict[str, Any] = {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "temperature": place % 2,
                "seed": place,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
            bodies.append(json.dumps(told).encode())
        return bodies

    def flags_of(self, cache_bytes: int) -> str:
        """Who waits for longer than a queue may last has no answer to compare: here all of them wait."""
        sizes = f"--context-length {self.context_tokens} --dtype {self.dtype} --kv-cache-memory {cache_bytes}"
        waits = f"--queue-timeout-ms {self.timeout_s:.0f}s --request-timeout-ms {self.timeout_s:.0f}s"
        return f"{sizes} {waits} {self.flags}"


@dataclass(slots=True)
class Chat:
    """What became of one."""

    ids: tuple[int, ...] = ()
    failure: str = ""
    status: str = "no answer"
    ttft_s: float = 0.0
    longest_gap_s: float = 0.0


@dataclass(slots=True)
class Watch:
    """What was seen while chats went on."""

    seen: list[tuple[int, int]] = field(default_factory=list)
    """(chats that went on, sequences that ran), again and again."""

    def told(self) -> dict[str, Any]:
        """The share of the looks before which others waited, and how many sequences ran then."""
        demand = sorted(ran for going, ran in self.seen if ran < going)
        if not demand:
            return {}
        ranks = {name: demand[int(share * (len(demand) - 1))] for name, share in (("p10", 0.1), ("p50", 0.5))}
        mean = round(sum(demand) / len(demand), 1)
        return {"looks": len(demand), "mean": mean, **ranks, "max": demand[-1]}


def measure(plan: GrowthPlan, say: Say) -> dict[str, Any]:
    """What `baton bench growth` prints. Raises StartupError."""
    allow_open_files()
    told: dict[str, Any] = {}
    answers: dict[str, list[Chat]] = {}
    sizes = {DEFAULT: plan.cache_bytes, QUARTER: plan.cache_bytes // 4}
    for cache in CACHES:
        if plan.only and cache not in plan.only:
            continue
        if cache == WHOLE:
            of_a_token = plan.cache_bytes / told[DEFAULT]["cache_tokens"]
            sizes[WHOLE] = round(SPARE * plan.chats * plan.context_tokens * of_a_token)
        with running("", plan.flags_of(sizes[cache])) as url:
            again = plan.alone if cache == WHOLE else 0
            answers[cache], told[cache] = uvloop.run(_asked(url, plan, again))
        say(f"{cache}: {json.dumps(told[cache])}")
    for cache in told if WHOLE in told else ():
        rates = [told[each]["output_tokens_per_s"] for each in (cache, WHOLE)]
        told[cache]["ratio"] = round(rates[0] / rates[1], 3) if rates[1] else None
        pairs = zip(answers[cache], answers[WHOLE], strict=True)
        told[cache]["equal"] = sum(bool(one.ids) and one.ids == other.ids for one, other in pairs)
    return {
        "chats": plan.chats,
        "context_tokens": plan.context_tokens,
        "dtype": plan.dtype,
        "prompt_tokens": str(plan.prompt_tokens),
        "flags": plan.flags,
        "seed": plan.seed,
        "caches": told,
        "ratio": told[DEFAULT].get("ratio") if DEFAULT in told else None,
    }


async def _asked(url: str, plan: GrowthPlan, again: int) -> tuple[list[Chat], dict[str, Any]]:
    server = ServerAddress.at(url)
    bodies = plan.bodies(model_of(server))
    pool = ConnectionPool(server)
    try:
        await _ask(pool, server, _short(bodies[0]), plan.timeout_s)
        before, tokens = counts(server, WATCHED), _positions(server)
        going, watch = Counter(chats=plan.chats), Watch()
        looking = asyncio.create_task(_look(url, going, watch))

        async def one(body: bytes) -> Reply | str:
            try:
                return await _ask(pool, server, body, plan.timeout_s)
            finally:
                going["chats"] -= 1

        with undisturbed() as outcome:
            replies = await asyncio.gather(*map(one, bodies))
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        after = counts(server, WATCHED)
        chats = [chat_of(each) for each in replies]
        alone = [chat_of(await _ask(pool, server, body, plan.timeout_s)) for body in bodies[:again]]
    finally:
        pool.close()
    drawn = sum(len(each.ids) for each in chats)
    told = {
        "cache_tokens": tokens,
        "statuses": dict(Counter(each.status for each in chats)),
        "failures": sorted({each.failure for each in chats if each.failure})[:FAILURES_TOLD],
        "seconds": round(outcome.wall_s, 1),
        "output_tokens": drawn,
        "output_tokens_per_s": round(drawn / outcome.wall_s, 1),
        "running_while_others_wait": watch.told(),
        "ttft_ms": spread([each.ttft_s for each in chats if each.ids]),
        "longest_gap_ms": spread([each.longest_gap_s for each in chats if each.ids]),
        "client_cpu_share": round(outcome.client_cpu_s / outcome.wall_s, 3),
        **counted_since(before, after),
    }
    if again:
        same = sum(one.ids == other.ids for one, other in zip(alone, chats, strict=False))
        told["equal_alone"] = f"{same} of {again}"
    return chats, told


async def _ask(pool: ConnectionPool, server: ServerAddress, body: bytes, timeout_s: float) -> Reply | str:
    """Or why there is no whole answer."""
    try:
        async with asyncio.timeout(timeout_s):
            return await pool.ask(server.post(ApiEndpoint.CHAT.path, body))
    except ServerBroke as error:
        return str(error)
    except TimeoutError:
        return f"no whole answer within {timeout_s:g} s"


async def _look(url: str, going: Mapping[str, int], watch: Watch) -> None:
    """Until cancelled."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        while True:
            with suppress(httpx.HTTPError):
                watch.seen.append((going["chats"], _running((await http.get("/workers")).json())))
            await asyncio.sleep(LOOK_S)


def _running(told: Mapping[str, Any]) -> int:
    """Sequences that decode workers continue."""
    return sum(each["queues"].get(RoomQueue.RUNNING, 0) for each in _decode(told))


def _decode(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [each for each in told["workers"] if each["side"] == Side.DECODE.value]


def _positions(server: ServerAddress) -> int:
    """That the caches of all decode workers hold. Raises NotMeasurable."""
    try:
        told = httpx.get(f"{server.url}/workers", trust_env=False).json()
    except (httpx.HTTPError, ValueError) as error:
        raise NotMeasurable(f"{server.url}/workers does not tell its workers: {error}") from None
    return sum(each["tokens_max"] for each in _decode(told))


def _short(body: bytes) -> bytes:
    """The same chat with a short end: what a first request has to prepare is not measured."""
    return json.dumps(json.loads(body) | {"max_tokens": 2}).encode()


def chat_of(reply: Reply | str) -> Chat:
    """What became of it; a text says why there is no answer."""
    if isinstance(reply, str):
        return Chat(failure=reply)
    status = str(reply.status)
    try:
        answer = understand(reply, reply.sent)
    except AnswerFailed as error:
        return Chat(failure=str(error), status="broken" if reply.status == httpx.codes.OK else status)
    ids: list[int] = []
    for line in reply.body.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                ids += choice.get("token_ids") or ()
    return Chat(tuple(ids), "", status, answer.ttft_s, max(answer.chunk_gaps_s, default=0.0))
