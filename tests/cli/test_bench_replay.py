"""Does `baton bench serve --trace` ask what a trace says, when it says, and again what was refused?"""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from baton.cli.bench.latencies import Objective
from baton.cli.bench.replay import ReplayPlan, measure, parse_classes
from baton.cli.bench.stream_client import ServerAddress
from baton.cli.bench.traces import Replay, TracedRequest, read_trace, replayed
from baton.cli.bench.workload import ApiEndpoint
from baton.runtime.errors import SettingsError
from tests.cli.test_bench_serve import EARLY_MS, paced
from tests.cli.typed import baton

TRACES: Final = Path(__file__).parents[2] / "docs" / "benchmarks" / "traces"
MOONCAKE: Final = (
    '{"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [7, 8]}\n'
    '{"timestamp": 1500, "input_length": 700, "output_length": 0, "hash_ids": [7, 9]}\n'
)
AZURE: Final = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 23:59:59.5000000,374,44\r\n"
    "2023-11-17 00:00:01.0000000,396,109\r\n"
)
NO_LIMIT: Final = Objective()
PLAN: Final = ReplayPlan(
    Replay(tuple(TracedRequest(each * 0.01, 12, 4) for each in range(6)), 1.0),
    in_flight_max=8,
    obeys=True,
    classes={},
    warm_up=0,
    vocabulary=32_000,
    seed=0,
    timeout_s=30.0,
)


def read(folder: Path, text: str, requests_max: int | None = None) -> tuple[TracedRequest, ...]:
    (folder / "trace").write_text(text, newline="")
    return read_trace(folder / "trace", requests_max)


def test_both_formats_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    assert read(tmp_path, MOONCAKE) == (
        TracedRequest(0, 700, 0, (7, 9)),
        TracedRequest(1.5, 1024, 5, (7, 8)),
    )
    assert read(tmp_path, AZURE) == (TracedRequest(0, 374, 44), TracedRequest(1.5, 396, 109))
    assert read(tmp_path, AZURE, 1) == (TracedRequest(0, 374, 44),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: neither JSON nor a table with TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("a,b\n1,2\n", "line 1: neither"),
        (AZURE.splitlines()[0], "it has no requests"),
        (AZURE + "2023-11-17 00:00:02,x,1\n", "line 4: ContextTokens: Input should be a valid integer"),
        (AZURE + "2023-11-17 00:00:02,1\n", "line 4: GeneratedTokens"),
        (AZURE + "yesterday,1,1\n", "line 4: TIMESTAMP"),
        (MOONCAKE + "{\n", "line 3: Invalid JSON"),
        (MOONCAKE + '{"timestamp": 0, "input_length": -1, "output_length": 1}', "line 3: input_length"),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        read(tmp_path, text)
    with pytest.raises(SettingsError, match="No such file"):
        read_trace(tmp_path / "none")


def test_times_and_lengths_are_multiplied_and_what_is_too_long_is_shortened(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE)
    assert replayed(trace, 0.5, 0.1).requests == (
        TracedRequest(0, 70, 1, (7, 9)),
        TracedRequest(0.75, 102, 1, (7, 8)),
    )
    short = replayed(
        (TracedRequest(0, 900, 60), TracedRequest(0, 30, 300), TracedRequest(0, 60, 40)), 1, 1, 100
    )
    assert [(each.prompt_tokens, each.output_tokens) for each in short.requests] == [
        (50, 50),
        (30, 50),
        (60, 40),
    ]
    assert short.shortened == 2


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.013, 0.001])
def test_prompts_begin_alike_as_far_as_their_blocks_are_equal(scale: float) -> None:
    """Whatever the scale leaves of a block."""
    lengths_and_blocks = [
        (1300, (1, 2, 3)),
        (1290, (1, 2, 3)),
        (1300, (1, 2, 4)),
        (1300, (5, 2, 3)),
        (1300, ()),
    ]
    trace = [TracedRequest(0, length, 1, blocks) for length, blocks in lengths_and_blocks]
    replay = replayed(trace, 1, scale)
    one, shorter, fork, other, unknown = (replay.prompt(place, 32_000, 0) for place in range(5))
    assert [len(each) for each in (one, shorter, fork)] == [
        each.prompt_tokens for each in replay.requests[:3]
    ]
    assert shorter == one[: len(shorter)]
    common = round(1024 * scale)
    assert fork[:common] == one[:common]
    if scale > 0.1:
        assert fork[common] != one[common]
        assert len({one[0], other[0], unknown[0]}) == 3
    assert replay.prompt(4, 32_000, 1) != unknown or len(unknown) < 3


@pytest.mark.parametrize(
    ("name", "requests"),
    [("mooncake-conversation.jsonl", 524), ("azure-conversation-2023.csv", 524), ("drift.csv", 228)],
)
def test_the_traces_that_lie_here_are_read(name: str, requests: int) -> None:
    trace = read_trace(TRACES / name)
    assert len(trace) == requests
    assert all(each.prompt_tokens and each.output_tokens for each in trace)
    assert all(len(each.blocks) in (0, -(-each.prompt_tokens // 512)) for each in trace)


def test_classes_are_numbers_with_weights() -> None:
    assert parse_classes("") == {}
    assert parse_classes("0@3, -10") == {0: 3, -10: 1}
    for wrong in ("high", "0@0", "0@", "1.5"):
        with pytest.raises(ValueError, match="have to be like"):
            parse_classes(wrong)


async def asked(server: ServerAddress, plan: ReplayPlan, objective: Objective = NO_LIMIT) -> dict[str, Any]:
    return await measure(
        server,
        plan,
        objective,
        endpoint=ApiEndpoint.COMPLETIONS,
        model="paced",
        prompts=None,
        ignore_eos=True,
    )


@pytest.mark.parametrize("status", [429, 503])
async def test_what_is_refused_is_asked_again_when_the_server_says_and_not_before(status: int) -> None:
    async with paced(fails=5, status=status, retry_after_s=1, gap_ms=0) as (server, at):
        told = await asked(at, PLAN, Objective(ttft_ms=900))
    refusals = told["refusals"]
    assert told["statuses"] == {"200": 6}
    assert (refusals["times"], refusals["requests"], refusals["served_in_the_end"]) == (1, 1, 1)
    assert (told["refused"], told["failed"]) == (1, 0)
    assert refusals["retry_after_ms"]["p50"] == 1000
    assert told["ttft_ms"]["max"] >= 1000 - EARLY_MS, "its wait is since it was due"
    assert told["goodput"]["share"] < 1
    assert len(server.bodies) == 1 + 6 + 1


async def test_who_does_not_obey_or_is_told_nothing_is_refused_once() -> None:
    async with paced(fails=4, retry_after_s=1, gap_ms=0) as (_, at):
        deaf = await asked(at, replace(PLAN, obeys=False))
    async with paced(fails=4, gap_ms=0) as (_, at):
        untold = await asked(at, PLAN)
    async with paced(fails=4, retry_after_s=60, gap_ms=0) as (_, at):
        late = await asked(at, PLAN)
    for told in (deaf, untold, late):
        assert told["statuses"] == {"200": 5, "429": 1}
        assert told["failures"] == ["HTTP 429: overloaded"]
        assert (told["refused"], told["failed"]) == (1, 1)
        assert told["refusals"]["served_in_the_end"] == 0
    assert untold["refusals"]["without_retry_after"] == 1


async def test_classes_are_asked_for_and_told_apart() -> None:
    async with paced(gap_ms=0) as (server, at):
        told = await asked(at, replace(PLAN, seed=1, classes={0: 1, 10: 1}))
    said = Counter(body.get("priority") for body in server.bodies[1:])
    assert {int(name): each["requests"] for name, each in told["by_priority"].items()} == said
    assert said.keys() == {0, 10}
    async with paced(gap_ms=0) as (server, at):
        told = await asked(at, PLAN)
    assert (told["by_priority"], told["server"]) == ({}, {})
    assert not any("priority" in body for body in server.bodies)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--time-scale", "2"], "--time-scale is of a --trace: give one"),
        (["--trace", "x", "--rate", "3"], "--rate is what a --trace says"),
        (["--trace", "/nonexistent"], "trace /nonexistent"),
    ],
)
def test_what_would_have_no_effect_is_refused(words: list[str], says: str) -> None:
    result = baton("bench", "serve", "--url", "http://127.0.0.1:1", *words)
    assert result.returncode == 2, result.stderr
    assert says in result.stderr


async def test_the_command_prints_one_object(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(AZURE)
    words = ["--trace", str(tmp_path / "trace"), "--time-scale", "0.01", "--length-scale", "0.05"]
    async with paced(gap_ms=0) as (_, at):
        result = await asyncio.to_thread(baton, "bench", "serve", "--url", at.url, *words)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["benchmark"], told["trace"], told["statuses"]) == ("serve", "trace", {"200": 2})
    assert (told["prompt_tokens"], told["output_tokens"]) == (19 + 20, 2 + 5)
