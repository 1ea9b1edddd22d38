"""Client that sends load to an OpenAI-compatible server, and measures its streamed answers.

Bytes are timed as they arrive and parsed after the run, so that the client takes little of a machine that it
shares with the server.
"""

import asyncio
import gc
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import httpx

from baton.cli.chat_settings import base_of
from baton.web.client_trust import tls_context

ERROR_CHARS: Final = 300
"""Most characters of a server's error message that are reported."""


class RequestFailed(Exception):
    """A request got no complete answer. The text says why."""


@dataclass(slots=True)
class Response:
    """One HTTP response, with the time of each read (`time.perf_counter`)."""

    sent: float
    status: int = 0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    """Chunks of the response body, each with the time at which it was read, in seconds of
    `time.perf_counter`."""

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.reads)


def connect(url: str, api_key: str = "", timeout_s: float = 600.0) -> httpx.AsyncClient:
    """Return an HTTP client for the server at `url`, with or without `/v1` at its end. Raises ValueError and
    StartupError."""
    try:
        base = httpx.URL(base_of(url if "://" in url else f"http://{url}"))
    except httpx.InvalidURL as error:
        raise ValueError(f"{url}: {error}") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise ValueError(f"{url}: it has to be a URL such as http://127.0.0.1:8000")
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    return httpx.AsyncClient(
        base_url=base,
        headers=headers | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        timeout=timeout_s,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
        verify=tls_context() if base.scheme == "https" else True,
    )


async def post(client: httpx.AsyncClient, path: str, body: bytes, timeout_s: float) -> Response:
    """Send the request `body`, and return the whole response. Raises RequestFailed."""
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
    return response


@dataclass(frozen=True, slots=True)
class Answer:
    """Times and token counts of one streamed answer."""

    ttft_s: float
    gaps_s: tuple[float, ...]
    """Seconds between successive events that brought tokens."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first. None for an answer of one token."""
        return sum(self.gaps_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def parse_answer(response: Response) -> Answer:
    """Parse the streamed response of the completions or chat API into times and token counts.

    The time of an event is that of the read that completed its line. Raises RequestFailed.
    """
    if response.status != 200:
        raise RequestFailed(f"HTTP {response.status}: {_error_message(response.body)}")
    chunks: list[float] = []
    usage: dict[str, Any] = {}
    rest, ended = b"", False
    for at, data in response.reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if ended or not line.startswith(b"data:"):
                continue
            ended = (text := line[5:].strip()) == b"[DONE]"
            event = {} if ended else _event(text)
            usage = event.get("usage") or usage
            if any(_has_tokens(choice) for choice in event.get("choices") or ()):
                chunks.append(at)
    if not ended or not chunks or not usage:
        lacks = "tokens" if not chunks else "usage" if not usage else "[DONE]"
        raise RequestFailed(f"the answer has no {lacks}")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        chunks[0] - response.sent,
        tuple(after - before for before, after in pairwise(chunks)),
        usage["prompt_tokens"],
        usage["completion_tokens"],
        details.get("cached_tokens") or 0,
    )


def _event(data: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError:
        raise RequestFailed(f"an event is not JSON: {data[:ERROR_CHARS]!r}") from None
    if "error" in event:
        raise RequestFailed(_error_message(data))
    return event


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Return whether one choice of an event brought tokens. In the completions API, every choice does."""
    delta = choice.get("delta")
    return delta is None or any(
        delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")
    )


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:ERROR_CHARS]
    except (ValueError, KeyError, TypeError):
        return body[:ERROR_CHARS].decode(errors="replace")


@dataclass(slots=True)
class LoadResult:
    """Result of one load test: the answers and the failures of its requests."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    """Seconds from the first request to the last byte."""
    client_cpu_s: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return the results as a JSON-ready dictionary: counts, latency percentiles and throughput."""
        output = sum(each.output_tokens for each in self.answers)
        return {
            "requests": len(self.answers),
            "failed": len(self.failures),
            "failures": sorted(set(self.failures))[:10],
            "wall_s": round(self.wall_s, 3),
            "client_cpu_share": round(self.client_cpu_s / self.wall_s, 4),
            "ttft_ms": percentiles_ms([each.ttft_s for each in self.answers]),
            "tpot_ms": percentiles_ms([tpot for each in self.answers if (tpot := each.tpot_s) is not None]),
            "itl_ms": percentiles_ms([gap for each in self.answers for gap in each.gaps_s]),
            "requests_per_s": round(len(self.answers) / self.wall_s, 4),
            "output_tokens_per_s": round(output / self.wall_s, 2),
            "prompt_tokens": sum(each.prompt_tokens for each in self.answers),
            "cached_tokens": sum(each.cached_tokens for each in self.answers),
            "output_tokens": output,
        }


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentiles and the maximum of `seconds`, in milliseconds (nearest
    rank).

    The result is empty if there are no values.
    """
    ordered = sorted(seconds)
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0} if ordered else {}
    places = {name: max(0, math.ceil(share * len(ordered)) - 1) for name, share in ranks.items()}
    return {name: round(ordered[place] * 1000, 3) for name, place in places.items()}


async def run_load(
    client: httpx.AsyncClient,
    path: str,
    bodies: Sequence[bytes],
    concurrency: int,
    timeout_s: float,
    rate: float | None = None,
) -> LoadResult:
    """Send all requests, wait for their answers and return the result. A failed request is counted in it.

    `concurrency`: most requests at a time. `rate`: requests per second, evenly spaced; None for no limit.
    """
    result, responses = LoadResult(), list[Response]()
    slots = asyncio.Semaphore(concurrency)

    async def send(body: bytes) -> None:
        try:
            responses.append(await post(client, path, body, timeout_s))
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
                if rate is not None:
                    await asyncio.sleep(max(0.0, start + index / rate - time.perf_counter()))
                await slots.acquire()
                tasks.create_task(send(body))
    finally:
        gc.enable()
    result.wall_s, result.client_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    for response in responses:
        try:
            result.answers.append(parse_answer(response))
        except RequestFailed as error:
            result.failures.append(str(error))
    return result
