"""Tests of `python -m bench growth`: its requests, and its figures."""

import json
from typing import Any, Final

import pytest

from baton.cli.load_client import Response
from bench.serving.growth_stacks import GrowthPlan, Watch, chat_of
from tests.bench.commands import run_bench


def plan(**given: Any) -> GrowthPlan:
    usual: dict[str, Any] = {
        "chats": 6,
        "context_tokens": 128,
        "cache_bytes": 2**26,
        "prompt_tokens": (8, 16),
        "dtype": "float32",
        "alone": 1,
        "only": (),
        "flags": "--decode 2",
        "seed": 3,
        "timeout_s": 60.0,
    }
    return GrowthPlan(**usual | given)


def test_chats_have_no_end_of_their_own_and_are_the_same_for_the_same_seed() -> None:
    bodies = [json.loads(each) for each in plan().bodies("m")]
    assert [json.loads(each) for each in plan().bodies("m")] == bodies
    assert not any("max_tokens" in each for each in bodies)
    assert all(each["ignore_eos"] and each["return_token_ids"] for each in bodies)
    assert [each["temperature"] for each in bodies] == [0, 1] * 3
    assert len({each["seed"] for each in bodies}) == 6
    assert len({each["messages"][0]["content"] for each in bodies}) == 6


def test_every_stack_differs_by_its_cache_alone() -> None:
    words = plan().flags_of(4096).split()
    assert words == [
        *("--context-length", "128", "--dtype", "float32"),
        *("--kv-cache-memory", "4096"),
        *("--queue-timeout-ms", "60s", "--request-timeout-ms", "60s", "--decode", "2"),
    ]


EVENTS: Final = (
    b'data: {"choices": [{"delta": {"content": "a"}, "token_ids": [5]}]}\n\n',
    b'data: {"choices": [{"delta": {"content": "b"}, "token_ids": [6, 7]}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}\n\ndata: [DONE]\n\n',
)


def test_an_answer_is_its_tokens_and_half_an_answer_has_none() -> None:
    whole = Response(1.0, 200, [(2.0, EVENTS[0]), (5.0, EVENTS[1]), (5.5, EVENTS[2])])
    chat = chat_of(whole)
    assert (chat.ids, chat.status, chat.ttft_s, chat.longest_gap_s) == ((5, 6, 7), "200", 1.0, 3.0)
    half = chat_of(Response(1.0, 200, [(2.0, EVENTS[0])]))
    assert (half.ids, half.status) == ((), "broken")
    refused = chat_of(Response(1.0, 503, [(2.0, b'{"error": {"message": "full"}}')]))
    assert (refused.ids, refused.status, refused.failure) == ((), "503", "HTTP 503: full")
    assert chat_of("no connection").status == "no answer"


def test_what_runs_is_told_of_the_looks_before_which_others_waited() -> None:
    assert Watch([(8, 0), (8, 5), (8, 7), (6, 6), (1, 1)]).summary() == {
        "looks": 3,
        "mean": 4.0,
        "p10": 0,
        "p50": 5,
        "max": 7,
    }
    assert Watch([(2, 2)]).summary() == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "half"], "--only half"),
        (["--only", "quarter"], "default has to be among them"),
        (["--cache", "much"], "--cache much"),
        (["--prompt-tokens", "600"], "at most half of --context-length"),
    ],
)
def test_what_cannot_be_asked_is_refused(words: list[str], says: str) -> None:
    result = run_bench("growth", *words)
    assert result.returncode == 2, result.stderr
    assert says in result.stderr
