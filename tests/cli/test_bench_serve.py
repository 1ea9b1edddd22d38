"""Does `baton bench serve` find what a server of known pace does, and count what it counts?"""

import asyncio
import json
import random
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import pytest
import uvicorn

from baton.cli.bench.answers import Answer, AnswerFailed, understand
from baton.cli.bench.latencies import Objective, summarise
from baton.cli.bench.lengths import Lengths
from baton.cli.bench.load import LoadGenerator, LoadOutcome
from baton.cli.bench.probe import NotMeasurable
from baton.cli.bench.stream_client import Reply, ServerAddress
from baton.cli.bench.trial import Closed, Open, measure
from baton.cli.bench.workload import (
    ApiEndpoint,
    ArrivalProcess,
    Ask,
    PromptForm,
    Workload,
    Writer,
    make_asks,
)
from tests.cli.paced_server import PacedServer, ServerPace
from tests.cli.typed import baton

SHORT = Workload(Lengths.parse("12"), Lengths.parse("8"))
TWO = Closed(2)
EARLY_MS = 2.0
"""A sleep may end so much before its time, by rounding."""


@asynccontextmanager
async def paced(**pace: Any) -> AsyncIterator[tuple[PacedServer, ServerAddress]]:
    server = PacedServer(ServerPace(**pace))
    http = uvicorn.Server(uvicorn.Config(server.app(), port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.01)
    port = http.servers[0].sockets[0].getsockname()[1]
    try:
        yield server, ServerAddress.at(f"http://127.0.0.1:{port}/v1")
    finally:
        http.should_exit = True
        await serving


async def measured(
    server: ServerAddress, workload: Workload = SHORT, pace: Closed | Open = TWO, **given: Any
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "objective": Objective(),
        "requests": 6,
        "repeats": 3,
        "warm_up": 1,
        "model": "paced",
        "prompts": None,
        "ignore_eos": True,
        "timeout_s": 30.0,
    }
    return await measure(server, workload, pace, **(settings | given))


async def test_the_pace_of_a_server_is_found_and_tokens_are_counted_by_its_usage_not_by_its_chunks() -> None:
    async with paced(first_ms=40, gap_ms=20, chunk=2) as (_, server):
        told = await measured(server)
    for each in (*told["rounds"], told["median"]):
        assert (each["requests"], each["failed"]) == (6, 0)
        assert (each["output_tokens"], each["chunks"]) == (6 * 8, 6 * 4)
        assert each["prompt_tokens"] == 6 * 12
        assert each["ttft_ms"]["p50"] >= 40 - EARLY_MS
        assert each["itl_ms"]["chunk"]["p50"] >= 20 - EARLY_MS
        assert each["tpot_ms"]["p50"] >= (3 * 20 - EARLY_MS) / 7
        assert each["itl_ms"]["token"]["max"] == pytest.approx(
            each["itl_ms"]["chunk"]["max"] * 3 / 7, rel=1e-3
        )
        assert 0 < each["client_cpu_share"] < 1
    assert len(told["rounds"]) == 3


async def test_an_objective_counts_the_requests_that_keep_all_of_it() -> None:
    async with paced(first_ms=30, gap_ms=5) as (_, server):
        kept = await measured(server, objective=Objective(ttft_ms=30_000, tpot_ms=30_000, gap_ms=30_000))
        missed = await measured(server, objective=Objective(ttft_ms=30_000, tpot_ms=1.0))
    assert kept["median"]["goodput"]["share"] == 1
    assert kept["median"]["goodput"]["requests_per_s"] == kept["median"]["requests_per_s"]
    assert missed["median"]["goodput"] == {"requests_per_s": 0, "share": 0}


def test_every_percentile_is_the_nearest_rank_of_what_was_measured() -> None:
    answers = [
        Answer(
            due=0.0, sent=0.0, chunks=(first,), ended=first, prompt_tokens=1, output_tokens=1, cached_tokens=0
        )
        for first in (0.4, 0.1, 0.3, 0.2)
    ]
    told = summarise(LoadOutcome(answers, wall_s=1.0), Objective())
    assert told["ttft_ms"] == {"p50": 200, "p90": 400, "p99": 400, "max": 400}


async def test_waiting_for_a_place_by_a_schedule_counts_as_waiting_for_the_server() -> None:
    pace = Open(rate=1000, arrivals=ArrivalProcess.FIXED, in_flight_max=1)
    async with paced(first_ms=50, gap_ms=0) as (_, server):
        told = await measured(server, pace=pace, requests=3, repeats=1)
    assert told["median"]["ttft_ms"]["max"] >= 3 * 50 - 2 - 3 * EARLY_MS
    assert told["median"]["late_ms"]["max"] >= 2 * 50 - 2 - 2 * EARLY_MS


async def test_a_server_without_token_ids_gets_text_of_the_length_by_its_own_count() -> None:
    async with paced(takes_ids=0, begins=3) as (_, server):
        told = await measured(server)
        with pytest.raises(NotMeasurable, match="texts only"):
            await measured(server, prompts=PromptForm.IDS)
        asked_for = await measured(server, prompts=PromptForm.TEXT)
    assert (told["prompts"], told["token_ids_refused"]) == ("text", "HTTP 400: prompt: texts only")
    assert told["median"]["prompt_tokens"] == 6 * 12
    assert "token_ids_refused" not in asked_for


async def test_chat_is_measured_from_its_first_text_not_from_the_role() -> None:
    async with paced(first_ms=40, gap_ms=0) as (_, server):
        workload = Workload(Lengths.parse("12"), Lengths.parse("8"), endpoint=ApiEndpoint.CHAT)
        told = await measured(server, workload)
    assert told["median"]["ttft_ms"]["p50"] >= 40 - EARLY_MS
    assert told["median"]["chunks"] == 6 * 8


async def test_a_failed_request_is_counted_and_told_and_not_measured() -> None:
    async with paced(fails=4, breaks=3) as (_, server):
        told = await measured(server, requests=12, repeats=1, warm_up=0)
    (only,) = told["rounds"]
    assert (only["requests"], only["failed"], only["refused"]) == (6, 6, 3)
    assert only["failures"] == ["HTTP 429: overloaded", "a worker died"]


async def test_a_server_that_answers_nothing_is_not_measurable_and_says_why() -> None:
    async with paced(fails=1) as (_, server):
        with pytest.raises(NotMeasurable, match="HTTP 429: overloaded"):
            await measured(server)
    with pytest.raises(NotMeasurable, match="no connection to"):
        await measured(server)


EVENT: Final = (
    b'data: {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\n'
)
BODY: Final = EVENT + b"data: [DONE]\n\n"
REPLY: Final = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
"""Of one token."""


async def asked_one_by_one(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], count: int
) -> LoadOutcome:
    """What comes of so many requests to a server that does this with each connection."""
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        load = LoadGenerator(ServerAddress.at(f"127.0.0.1:{port}"), "/", 10)
        outcome = await load.closed([Ask(b"{}")] * count, 1)
        load.close()
    return outcome


async def test_a_connection_that_the_server_dropped_between_requests_is_replaced() -> None:
    connections = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(REPLY)
        with_next = await reader.read(1)
        assert with_next, "the client keeps its connection"
        writer.close()

    outcome = await asked_one_by_one(once, 3)
    assert (len(outcome.answers), outcome.failures) == (3, [])
    assert connections == 3


async def test_what_is_lost_with_a_connection_that_broke_before_the_answer_is_waited_for() -> None:
    asked, lost_s = 0, 0.0

    async def second_is_dropped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked, lost_s
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n{}"):
                asked += 1
                if asked == 2:
                    await asyncio.sleep(0.2)
                    lost_s = time.perf_counter()
                    break
                writer.write(REPLY)
        writer.close()

    outcome = await asked_one_by_one(second_is_dropped, 2)
    assert (len(outcome.answers), outcome.failures, asked) == (2, [], 3)
    first, second = outcome.answers
    assert first.ended <= second.due < lost_s <= second.sent
    assert second.ttft_s >= 0.2 - EARLY_MS / 1000


def test_the_same_seed_asks_the_same_and_turns_share_only_their_prefix() -> None:
    workload = Workload(Lengths.parse("40-80"), Lengths.parse("4"), shared_prefix=0.5, seed=3)
    writer = Writer("m", ApiEndpoint.COMPLETIONS, PromptForm.IDS)
    one, again, other = (make_asks(workload, writer, 5, turn) for turn in (1, 1, 2))
    assert one == again
    prompts = [json.loads(each.body)["prompt"] for each in (*one, *other)]
    longest = max(prompts, key=len)
    for prompt in prompts:
        assert 40 <= len(prompt) <= 80
        shared = round(len(prompt) / 2)
        assert prompt[:shared] == longest[:shared]
    assert len({tuple(prompt[-20:]) for prompt in prompts}) == 10


def test_loads_of_other_lengths_begin_otherwise_with_the_same_seed() -> None:
    """Else a short prompt is the beginning of a long one that was asked before, which a cache has kept."""
    writer = Writer("m", ApiEndpoint.COMPLETIONS, PromptForm.IDS)
    workloads = [Workload(Lengths.parse(tokens), Lengths.parse("4")) for tokens in ("512", "64", "64-512")]
    asks = [make_asks(workload, writer, 1, turn=1)[0] for workload in workloads]
    beginnings = {tuple(json.loads(each.body)["prompt"][:8]) for each in asks}
    assert len(beginnings) == 3


def test_lengths_are_drawn_by_their_weights() -> None:
    lengths = Lengths.parse("128@3, 1024,10-20@4")
    drawn = [lengths.draw(random.Random(seed)) for seed in range(800)]
    assert drawn.count(1024) < drawn.count(128) < sum(each <= 20 for each in drawn)
    assert set(drawn) == {128, 1024, *range(10, 21)}
    assert (str(lengths), lengths.longest) == ("128@3,1024,10-20@4", 1024)


@pytest.mark.parametrize("text", ["", "0", "9-3", "5@0", "x", "1,,2", "1.5"])
def test_a_wrong_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"it has to be|at least 1"):
        Lengths.parse(text)


def test_an_event_has_the_time_of_the_read_that_completed_it() -> None:
    stream = (
        b'data: {"choices": [{"text": "a"}]}\r\n\r\ndata: {"choices": [{"text": "b"}]}\n\n'
        b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
    )
    second = stream.index(b"b")
    pieces = [(2.0, stream[:10]), (3.0, stream[10:second]), (5.0, stream[second:])]
    answer = understand(Reply(sent=1.0, status=200, pieces=pieces, ended=6.0), due=0.5)
    assert answer.chunks == (3.0, 5.0)
    assert (answer.ttft_s, answer.tpot_s, answer.chunk_gaps_s) == (2.5, 2.0, [2.0])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"data: [DONE]\n\n", "no tokens"),
        (b'data: {"choices": [{"text": "a"}]}\n\n', r"without \[DONE\]"),
        (b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n', "no usage"),
        (b"data: {\n\n", "not JSON"),
    ],
)
def test_half_an_answer_is_a_failure(body: bytes, says: str) -> None:
    with pytest.raises(AnswerFailed, match=says):
        understand(Reply(0.0, 200, [(1.0, body)], 1.0), 0.0)


def test_more_at_a_time_than_there_are_requests_is_refused() -> None:
    result = baton("bench", "serve", "--url", "http://127.0.0.1:1", "--concurrency", "64", "--requests", "32")
    assert result.returncode == 2
    assert "--concurrency 64 of --requests 32" in result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--arrivals", "fixed"], "--arrivals and --in-flight-max are of a --rate"),
        (["--in-flight-max", "4"], "--arrivals and --in-flight-max are of a --rate"),
        (["--rate", "3", "--concurrency", "2"], "--rate and --concurrency: give one of them"),
        (["--rate", "nan"], "'--rate': Input should be"),
        (["--rate", "inf"], "'--rate': Input should be"),
    ],
)
def test_what_would_have_no_effect_is_refused(words: list[str], says: str) -> None:
    result = baton("bench", "serve", "--url", "http://127.0.0.1:1", *words)
    assert result.returncode == 2, result.stderr
    assert says in result.stderr


def test_the_command_prints_one_object() -> None:
    words = ["bench", "serve", "--requests", "4", "--repeats", "3", "--output-tokens", "4"]

    async def run() -> subprocess.CompletedProcess[str]:
        async with paced() as (_, at):
            more = ["--url", at.url, "--tpot-slo-ms", "9999", "--json"]
            return await asyncio.to_thread(baton, *words, *more, environ={"OPENAI_API_KEY": "key"})

    result = asyncio.run(run())
    assert result.returncode == 0, result.stderr
    body = json.loads(result.stdout)
    assert body["benchmark"] == "serve"
    assert (body["model"], body["prompts"], body["concurrency"], body["repeats"]) == ("paced", "ids", 4, 3)
    for measure_name in ("ttft_ms", "tpot_ms", "end_to_end_ms"):
        assert set(body["median"][measure_name]) == {"p50", "p90", "p99", "max"}
    assert body["median"]["goodput"]["share"] == 1
