"""Tests of local rooms, whose prompts the decode worker computes, by what clients see."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.process.stack import Stack, running_stack
from tests.process.structured import tiny_model
from tests.process.test_retraction import CONTEXT, Asking, of_ranks
from tests.support.shared import Shared

BETWEEN: Final = 8
LOCAL: Final = "baton_decode_local_rooms_total"


@pytest.fixture(scope="module")
def model(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", demo_model_dir)


@pytest.fixture(scope="module")
def stacks(model: Path, request: pytest.FixtureRequest) -> Iterator[Shared[Stack]]:
    """The worker that draws has as many ranks as the parameter says."""
    with Shared(
        running_stack,
        str(model),
        decode=[{"tp": str(request.param)}],
        bootstrap={"context_length": str(CONTEXT)},
        kv_cache_memory="4MiB",
        context_length=str(CONTEXT),
        dtype="float32",
        group_timeout_ms="10000",
    ) as shared:
        yield shared


@pytest.fixture
def stack(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
    return stacks.lend(request.node)


def local_rooms(stack: Stack) -> float:
    return stack.services["decode-0"].total(LOCAL)


@pytest.mark.timeout(300)
@of_ranks(1, more=[2])
def test_the_death_of_prefill_is_slower_and_no_error(stacks: Shared[Stack], stack: Stack) -> None:
    """Each answer is the one that is drawn alone: with prefill, without it, and when it is back."""
    start, asking = stack.idle_gauges(), stacks.once("asking", Asking)
    with asking.over_and_over() as rounds:
        rounds.wait(BETWEEN, 0)
        stack.forget("prefill-0")
        stack.services["prefill-0"].kill()
        before = local_rooms(stack)
        rounds.wait(4 * BETWEEN, 0)
        assert local_rooms(stack) >= before + BETWEEN
        stack.restart("prefill-0")
        stack.wait_ready(2)
        rounds.wait(BETWEEN, 0)
    assert not rounds.wrong, rounds.wrong
    assert not rounds.refused
    stack.wait_idle(start)
