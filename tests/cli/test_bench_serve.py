"""Tests of `baton bench serve` against a server whose pace is known."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from baton.cli.load_benchmark import ApiEndpoint, NotMeasurable, Workload, measure
from baton.cli.load_client import (
    Answer,
    LoadResult,
    RequestFailed,
    Response,
    connect,
    parse_answer,
    run_load,
)
from tests.cli.paced_server import PacedServer, ServerPace
from tests.cli.typed import baton

SHORT = Workload(prompt_tokens=12, output_tokens=8)
EARLY_MS = 2.0
"""Most milliseconds by which a sleep ends before its time, by rounding."""


@asynccontextmanager
async def paced(**pace: Any) -> AsyncIterator[tuple[PacedServer, str]]:
    """Serve at this pace, and yield the server and its base URL."""
    server = PacedServer(ServerPace(**pace))
    http = uvicorn.Server(uvicorn.Config(server.app(), port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.01)
    port = http.servers[0].sockets[0].getsockname()[1]
    try:
        yield server, f"http://127.0.0.1:{port}/v1"
    finally:
        http.should_exit = True
        await serving


async def measured(
    url: str, workload: Workload = SHORT, requests: int = 6, concurrency: int = 2, **given: Any
) -> tuple[dict[str, Any], LoadResult]:
    async with connect(url) as client:
        given = {"warm_up": 1, "timeout_s": 30.0} | given
        return await measure(client, workload, requests, concurrency, **given)


async def test_latencies_are_the_servers_and_tokens_are_counted_by_its_usage_not_by_its_chunks() -> None:
    async with paced(first_ms=40, gap_ms=20, chunk=2) as (_, url):
        _, result = await measured(url)
    figures = result.summary()
    assert (figures["requests"], figures["failed"]) == (6, 0)
    assert (figures["output_tokens"], figures["prompt_tokens"]) == (6 * 8, 6 * 12)
    assert {len(each.gaps_s) for each in result.answers} == {3}
    assert figures["ttft_ms"]["p50"] >= 40 - EARLY_MS
    assert figures["itl_ms"]["p50"] >= 20 - EARLY_MS
    assert figures["tpot_ms"]["p50"] >= (3 * 20 - EARLY_MS) / 7
    assert 0 < figures["client_cpu_share"] < 1


def test_every_percentile_is_the_nearest_rank() -> None:
    answers = [Answer(first, (), 1, 1, 0) for first in (0.4, 0.1, 0.3, 0.2)]
    assert LoadResult(answers, wall_s=1.0).summary()["ttft_ms"] == {
        "p50": 200,
        "p90": 400,
        "p99": 400,
        "max": 400,
    }


async def test_a_load_with_a_rate_sends_no_sooner() -> None:
    async with paced(first_ms=1, gap_ms=0) as (_, url), connect(url) as client:
        bodies = SHORT.bodies("m", 3, "0")
        result = await run_load(client, SHORT.endpoint.path, bodies, 3, 30.0, rate=10)
    assert result.wall_s >= 0.2 - EARLY_MS / 1000


async def test_a_server_that_refuses_token_ids_gets_words() -> None:
    async with paced(takes_ids=0) as (server, url):
        settings, result = await measured(url)
        assert isinstance(server.bodies[-1]["prompt"], str)
    assert settings["load"]["as_text"]
    assert len(result.answers) == 6


async def test_chat_is_measured_from_its_first_text_not_from_the_role() -> None:
    async with paced(first_ms=40, gap_ms=0) as (_, url):
        _, result = await measured(url, Workload(12, 8, ApiEndpoint.CHAT))
    assert result.summary()["ttft_ms"]["p50"] >= 40 - EARLY_MS
    assert sum(1 + len(each.gaps_s) for each in result.answers) == 6 * 8


async def test_a_failed_request_is_counted_and_not_measured() -> None:
    async with paced(fails=4, breaks=3) as (_, url):
        _, result = await measured(url, requests=11, warm_up=0)
    figures = result.summary()
    assert (figures["requests"], figures["failed"]) == (5, 6)
    assert figures["failures"] == ["HTTP 429: overloaded", "a worker died"]


async def test_a_server_that_answers_nothing_is_not_measurable() -> None:
    async with paced(fails=1) as (_, url):
        with pytest.raises(NotMeasurable, match="HTTP 429: overloaded"):
            await measured(url)
    with pytest.raises(NotMeasurable, match="no server answers"):
        await measured(url)


async def test_an_answer_that_takes_longer_than_allowed_has_failed() -> None:
    async with paced(first_ms=5_000) as (_, url), connect(url) as client:
        result = await run_load(client, SHORT.endpoint.path, SHORT.bodies("m", 1, "0"), 1, 0.05)
    assert result.failures == ["no complete answer within 0.05 s"]


def test_the_same_seed_makes_the_same_requests_and_runs_share_only_the_prefix() -> None:
    workload = Workload(40, 4, shared_prefix=0.5, seed=3)
    one, again, other = (workload.bodies("m", 5, run) for run in ("1", "1", "2"))
    assert one == again
    prompts = [json.loads(each)["prompt"] for each in (*one, *other)]
    assert {len(each) for each in prompts} == {40}
    assert len({tuple(each[:20]) for each in prompts}) == 1
    assert len({tuple(each[20:]) for each in prompts}) == 10


def test_prompts_of_other_lengths_begin_otherwise() -> None:
    """A short prompt would otherwise be the cached beginning of a long one."""
    first = [json.loads(Workload(length, 4).bodies("m", 1, "1")[0])["prompt"] for length in (64, 512)]
    assert first[0][:8] != first[1][:8]


def test_an_event_has_the_time_of_the_read_that_completed_it() -> None:
    stream = (
        b'data: {"choices": [{"text": "a"}]}\r\n\r\ndata: {"choices": [{"text": "b"}]}\n\n'
        b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
    )
    second = stream.index(b"b")
    reads = [(2.0, stream[:10]), (3.0, stream[10:second]), (5.0, stream[second:])]
    answer = parse_answer(Response(sent=0.5, status=200, reads=reads))
    assert (answer.ttft_s, answer.tpot_s, answer.gaps_s) == (2.5, 2.0, (2.0,))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"data: [DONE]\n\n", "no tokens"),
        (b'data: {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1}}\n\n', r"no \[DONE\]"),
        (b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n', "no usage"),
        (b"data: {\n\n", "not JSON"),
    ],
)
def test_half_an_answer_is_a_failure(body: bytes, says: str) -> None:
    with pytest.raises(RequestFailed, match=says):
        parse_answer(Response(0.0, 200, [(1.0, body)]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--concurrency", "64", "--requests", "32"], "--concurrency 64 with --requests 32"),
        (["--endpoint", "speech"], "speech"),
        (["--url", "ftp://x"], "it has to be a URL"),
    ],
)
def test_what_would_have_no_effect_is_refused(words: list[str], says: str) -> None:
    result = baton("bench", "serve", *words)
    assert result.returncode == 2, result.stderr
    assert says in result.stderr


async def test_the_command_prints_one_object() -> None:
    async with paced() as (_, url):
        words = ["bench", "serve", "--requests", "4", "--output-tokens", "4", "--url", url]
        result = await asyncio.to_thread(baton, *words, environ={"OPENAI_API_KEY": "key"})
    assert result.returncode == 0, result.stderr
    body = json.loads(result.stdout)
    assert (body["benchmark"], body["model"], body["load"]["concurrency"]) == ("serve", "paced", 4)
    for name in ("ttft_ms", "tpot_ms", "itl_ms"):
        assert set(body[name]) == {"p50", "p90", "p99", "max"}


async def test_the_key_is_sent_as_a_bearer_token() -> None:
    async with connect("http://127.0.0.1:1/v1", "secret") as client:
        assert client.headers["Authorization"] == "Bearer secret"
        assert client.base_url == httpx.URL("http://127.0.0.1:1")
