"""Load on an OpenAI-compatible server, and the times of its streamed answers.

Bytes are timed as they arrive and parsed after the run, so that the client takes little of a machine
that it shares with the server.
"""

import asyncio
import gc
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from baton.cli.chat_settings import base_of
from baton.web.client_trust import tls_context

ERROR_CHARS: Final = 300
"""Characters of a server's error message that are reported."""


class RequestFailed(Exception):
    """The request has no complete answer. The text says why."""


@dataclass(slots=True)
class Response:
    """One HTTP response, timed read by read with `time.perf_counter`."""

    sent: float
    status: int = 0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    """Parts of the body, each with the time of the read that brought it."""
    ended: float = 0.0

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.reads)


def connect(url: str, api_key: str = "", timeout_s: float = 600.0) -> httpx.AsyncClient:
    """Return a client of the server at `url`, with or without `/v1`. Raises ValueError and StartupError."""
    base = base_of(url if "://" in url else f"http://{url}")
    try:
        parts = httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ValueError(f"{url}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ValueError(f"{url}: it has to be a URL such as http://127.0.0.1:8000")
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        base_url=base,
        headers=headers,
        timeout=timeout_s,
        limits=unlimited,
        trust_env=False,
        verify=tls_context() if parts.scheme == "https" else True,
    )


async def post(client: httpx.AsyncClient, path: str, body: bytes, timeout_s: float) -> Response:
    """Send `body` and return the whole response. Raises RequestFailed."""
    response = Response(time.perf_counter())
    try:
        async with asyncio.timeout(timeout_s), client.stream("POST", path, content=body) as stream:
            response.status = stream.status_code
            async for data in stream.aiter_raw():
                response.reads.append((time.perf_counter(), data))
    except TimeoutError:
        raise RequestFailed(f"no complete answer within {timeout_s:g} s") from None
    except httpx.HTTPError as error:
        raise RequestFailed(f"{client.base_url}: {error or type(error).__name__}") from None
    response.ended = time.perf_counter()
    return response


@dataclass(frozen=True, slots=True)
class Answer:
    """Times and token counts of one streamed answer. Times are in seconds, by `time.perf_counter`."""

    start: float
    """Arrival by the schedule. Without a schedule, when the request was sent."""
    chunks: tuple[float, ...]
    """Arrival of each event that brought tokens; at least one."""
    ended: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.chunks[0] - self.start

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first. None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


def parse_answer(response: Response, start: float | None = None) -> Answer:
    """Parse a stream of the completions or chat API. Raises RequestFailed."""
    if response.status != 200:
        raise RequestFailed(f"HTTP {response.status}: {_error_message(response.body)}")
    chunks: list[float] = []
    usage: dict[str, Any] = {}
    for at, data in _events(response.reads):
        if data == b"[DONE]":
            break
        try:
            event = json.loads(data)
        except ValueError:
            raise RequestFailed(f"an event is not JSON: {data[:ERROR_CHARS]!r}") from None
        if "error" in event:
            raise RequestFailed(_error_message(data))
        usage = event.get("usage") or usage
        if any(_has_tokens(choice) for choice in event.get("choices") or ()):
            chunks.append(at)
    else:
        raise RequestFailed("the answer ends without [DONE]")
    if not chunks or not usage:
        raise RequestFailed(f"the answer has no {'usage' if chunks else 'tokens'}")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        response.sent if start is None else start,
        tuple(chunks),
        response.ended,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        details.get("cached_tokens") or 0,
    )


def _events(reads: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield each event's data, with the time of the read that completed its line."""
    rest = b""
    for at, data in reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[5:].strip()


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Return whether an event's choice brought tokens; in the completions API, every one does."""
    delta = choice.get("delta")
    if delta is None:
        return True
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:ERROR_CHARS]
    except (ValueError, KeyError, TypeError):
        return body[:ERROR_CHARS].decode(errors="replace")


@dataclass(slots=True)
class LoadResult:
    """Answers and failures of one run."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    """From the first request to the last byte."""
    client_cpu_s: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run, without latencies if nothing was answered."""
        answers, wall_s = self.answers, self.wall_s
        figures: dict[str, Any] = {
            "requests": len(answers),
            "failed": len(self.failures),
            "failures": sorted(set(self.failures))[:10],
            "wall_s": round(wall_s, 3),
            "client_cpu_share": round(self.client_cpu_s / wall_s, 4),
        }
        if not answers:
            return figures
        output = sum(each.output_tokens for each in answers)
        return figures | {
            "ttft_ms": percentiles_ms([each.ttft_s for each in answers]),
            "tpot_ms": percentiles_ms([tpot for each in answers if (tpot := each.tpot_s) is not None]),
            "itl_ms": percentiles_ms([gap for each in answers for gap in each.gaps_s]),
            "end_to_end_ms": percentiles_ms([each.ended - each.start for each in answers]),
            "requests_per_s": round(len(answers) / wall_s, 4),
            "output_tokens_per_s": round(output / wall_s, 2),
            "prompt_tokens": sum(each.prompt_tokens for each in answers),
            "cached_tokens": sum(each.cached_tokens for each in answers),
            "output_tokens": output,
            "chunks": sum(len(each.chunks) for each in answers),
        }

    def goodput(self, ttft_ms: float | None, tpot_ms: float | None) -> dict[str, float]:
        """Return requests a second that met both limits, and their share of all requests."""
        good = sum(
            each.ttft_s * 1000 <= (math.inf if ttft_ms is None else ttft_ms)
            and (each.tpot_s or 0.0) * 1000 <= (math.inf if tpot_ms is None else tpot_ms)
            for each in self.answers
        )
        share = good / max(1, len(self.answers) + len(self.failures))
        return {"requests_per_s": round(good / self.wall_s, 4), "share": round(share, 4)}


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return nearest ranks in milliseconds. Empty for no values."""
    ordered = sorted(seconds)

    def rank(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)] * 1000, 3)

    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: rank(share) for name, share in ranks.items()} if ordered else {}


async def run_load(
    client: httpx.AsyncClient,
    path: str,
    bodies: Sequence[bytes],
    concurrency: int,
    timeout_s: float,
    arrivals_s: Sequence[float] | None = None,
) -> LoadResult:
    """Send all requests and wait for their answers. A failed request is part of the result.

    concurrency: most requests at a time. arrivals_s: when each request is due, in seconds from the start.
    Without it, each is sent as soon as the concurrency allows. Waiting in the client counts as latency.
    """
    result, responses = LoadResult(), list[tuple[float | None, Response]]()
    slots = asyncio.Semaphore(concurrency)

    async def send(body: bytes, due: float | None) -> None:
        try:
            responses.append((due, await post(client, path, body, timeout_s)))
        except RequestFailed as error:
            result.failures.append(str(error))
        finally:
            slots.release()

    gc.collect()
    gc.disable()  # its pauses would be measured as the server's
    start, cpu = time.perf_counter(), time.process_time()
    try:
        async with asyncio.TaskGroup() as tasks:
            for index, body in enumerate(bodies):
                due = None if arrivals_s is None else start + arrivals_s[index]
                if due is not None:
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await slots.acquire()
                tasks.create_task(send(body, due))
    finally:
        gc.enable()
    result.wall_s, result.client_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    for due, response in responses:
        try:
            result.answers.append(parse_answer(response, due))
        except RequestFailed as error:
            result.failures.append(str(error))
    return result
