"""Tests of processes that serve both sides, by what clients see."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from baton.bootstrap.canary import REQUEST_ID
from tests.cli.typed import baton
from tests.http import web
from tests.idle import POLL_S
from tests.oracle import reference_greedy
from tests.process.load import any_prompts
from tests.process.stack import Stack, running_stack
from tests.process.structured import tiny_model
from tests.process.test_retraction import CONTEXT, Asking
from tests.support.shared import Shared

BETWEEN: Final = 8
"""Answers between two events of the test."""
OUTPUT: Final = 24
COMPUTED: Final = "baton_prompts_computed_total"
HANDED_OVER: Final = "handed_over"
KEPT: Final = "same_process"
RENEWED_MS: Final = 60_000


@pytest.fixture(scope="module")
def model(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", demo_model_dir)


@pytest.fixture(scope="module")
def stacks(model: Path) -> Iterator[Shared[Stack]]:
    with Shared(
        running_stack,
        str(model),
        prefill=(),
        decode=(),
        both=[{}, {}],
        bootstrap={"context_length": str(CONTEXT)},
        kv_cache_memory="8MiB",
        context_length=str(CONTEXT),
        dtype="float32",
    ) as shared:
        yield shared


@pytest.fixture
def stack(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
    return stacks.lend(request.node)


def computed(stack: Stack) -> dict[str, float]:
    """Prompts so far, by why they were computed where they were."""
    samples = stack.services["bootstrap"].metrics().items()
    return {dict(labels)["why"]: count for (name, labels), count in samples if name == COMPUTED}


def newest(stack: Stack) -> dict[str, Any]:
    """The client's request that came last, as operators see it."""
    listed: list[dict[str, Any]] = web().get(f"{stack.url}/requests", timeout=10).json()["requests"]
    return next(each for each in listed if not each["request_id"].startswith(REQUEST_ID))


def weigh(stack: Stack, name: str, prefill: int) -> None:
    said = baton("role", name, "--prefill", str(prefill), "--url", stack.url)
    assert (said.returncode, said.stdout) == (
        0,
        f"{name}: prefill {prefill}, decode {100 - prefill}\n",
    ), said.stderr


def greedy(stack: Stack, prompt: list[int], **more: Any) -> list[int]:
    body = {
        "model": web().get(f"{stack.url}/v1/models").json()["data"][0]["id"],
        "prompt": prompt,
        "max_tokens": OUTPUT,
        "temperature": 0,
        "return_token_ids": True,
        **more,
    }
    reply = web().post(f"{stack.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


@pytest.mark.timeout(300)
def test_answers_are_the_references_in_one_process_and_handed_over_between_two(
    stack: Stack, model: Path
) -> None:
    start = stack.idle_gauges()
    prompts = [list(prompt) for prompt in any_prompts((20, 61, 90), 1_000)]
    wanted = reference_greedy(model, prompts, OUTPUT)
    before = computed(stack)
    assert [greedy(stack, prompt) for prompt in prompts] == wanted
    kept = computed(stack)
    assert kept[KEPT] == before[KEPT] + len(prompts)
    assert newest(stack)["same_process"] is True
    weigh(stack, "worker-0", 100)
    weigh(stack, "worker-1", 0)
    # Scores are prefill's, and what is cached by now need not be computed.
    assert [greedy(stack, prompt, cache_salt="another") for prompt in prompts] == wanted
    after = computed(stack)
    assert after[KEPT] == kept[KEPT], "one side of each process gets nothing"
    assert newest(stack)["same_process"] is False
    assert sum(after.values()) == sum(kept.values()) + len(prompts)
    stack.wait_idle(start)


@pytest.mark.timeout(300)
def test_weights_that_change_and_a_process_that_dies_cost_nobody_a_token(
    stacks: Shared[Stack], stack: Stack
) -> None:
    for name in ("worker-0", "worker-1"):
        weigh(stack, name, 50)
    start, asking = stack.idle_gauges(), stacks.once("asking", Asking)
    with asking.over_and_over() as rounds:
        rounds.wait(BETWEEN, 0)
        for prefill in (100, 0, 90, 50):
            weigh(stack, "worker-0", prefill)
            weigh(stack, "worker-1", 100 - prefill)
            rounds.wait(BETWEEN, 0)
        stack.forget("worker-1")
        stack.services["worker-1"].kill()
        rounds.wait(BETWEEN, 0)
        stack.restart("worker-1")
        stack.wait_ready(4)
        rounds.wait(BETWEEN, 0)
    assert not rounds.wrong, rounds.wrong
    assert not rounds.refused
    assert computed(stack)[HANDED_OVER] > 0
    stack.wait_idle(start)


def wait_renewed(stack: Stack) -> None:
    """Wait until every side has renewed its lease after this call."""
    since_s = time.monotonic()
    while True:
        passed_ms = 1000 * (time.monotonic() - since_s)  # before the answer counts on
        workers = web().get(f"{stack.url}/live", timeout=10).json()["workers"]
        if all(each["told_ms_ago"] is not None and each["told_ms_ago"] < passed_ms for each in workers):
            return
        assert passed_ms < RENEWED_MS, workers
        time.sleep(POLL_S)


@pytest.mark.timeout(300)
def test_a_bootstrap_that_starts_anew_hears_of_the_weights(stack: Stack) -> None:
    start = stack.idle_gauges()
    told = {"worker-0": 80, "worker-1": 0}
    bootstrap = stack.services["bootstrap"]
    for name, prefill in told.items():
        weigh(stack, name, prefill)
    wait_renewed(stack)
    wait_renewed(stack)  # who renews its lease again has read what it was answered
    bootstrap.kill()
    stack.restart("bootstrap")
    stack.wait_ready(4)
    workers = web().get(f"{stack.url}/ready", timeout=10).json()["workers"]
    assert {(each["process"], each["side"]): each["weight"] for each in workers} == {
        (name, side): weight
        for name, prefill in told.items()
        for side, weight in (("prefill", prefill), ("decode", 100 - prefill))
    }
    for name in told:
        weigh(stack, name, 50)
    stack.wait_idle(start)


def test_a_process_that_is_not_there_has_no_weight(stack: Stack) -> None:
    said = baton("role", "worker-9", "--prefill", "10", "--url", stack.url)
    assert said.returncode == 1
    assert "no process called 'worker-9' serves both sides here" in said.stderr
