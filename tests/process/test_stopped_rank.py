"""Tests of streams while a following rank is stopped, and its leader goes on renewing the lease.

The group waits for it, for as long as groups wait. The bootstrap does not: a worker whose turn does not end
gets no rooms, those that it had go on elsewhere, and when the rank goes on the worker serves again as the
same.
"""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http import web
from tests.models.eight_heads import VOCABULARY, eight_heads
from tests.process.load import Asked, any_prompts, asked
from tests.process.stack import SPLIT, Stack, running_stack
from tests.process.test_groups_kill import ANSWER_S, CLIENTS, LENGTHS, Clients, wait_held

OUTPUT_TOKENS = 60
GROUP_TIMEOUT_MS = 600_000
"""Timeout of a rank group, ms. It is far above the test's duration, so it is not what makes the streams go
on."""


def wait_listed(stack: Stack, name: str, state: str | None) -> dict[str, Any] | None:
    """Wait until the bootstrap lists worker `name` in this state. With None, wait until it is not listed."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        workers = web().get(f"{stack.url}/ready", timeout=10).json()["workers"]
        found: list[dict[str, Any]] = [each for each in workers if each["name"] == name]
        if [each["state"] for each in found] == ([] if state is None else [state]):
            return found[0] if found else None
        assert time.monotonic() < deadline, stack.tails()
        time.sleep(0.05)


@pytest.fixture(
    params=["decode", pytest.param("prefill", marks=pytest.mark.all_groups)],
)
def side(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stack(side: str, demo_model_dir: Path, tmp_path: Path) -> Iterator[Stack]:
    """A stack with a group of two ranks and a worker of one rank on `side`, and one worker on the other."""
    group, alone = {"tp": "2"}, dict[str, str]()
    with running_stack(
        str(eight_heads(tmp_path, demo_model_dir)),
        prefill=[group, alone] if side == "prefill" else [alone],
        decode=[{**each, **SPLIT} for each in ([group, alone] if side == "decode" else [alone])],
        bootstrap={"lease_ms": "3000", "retry_wait_ms": "120000", "room_attempts": "8"},
        dtype="float32",
        kv_cache_memory="8MiB",
        group_timeout_ms=str(GROUP_TIMEOUT_MS),
    ) as started:
        yield started


@pytest.fixture
def known(stack: Stack) -> Asked:
    return asked(Path(stack.model), any_prompts(LENGTHS, VOCABULARY), OUTPUT_TOKENS)


@pytest.mark.timeout(300)
def test_streams_go_on_elsewhere_token_for_token_and_the_worker_is_back_without_a_restart(
    stack: Stack, known: Asked, side: str
) -> None:
    start = stack.idle_gauges()
    name = f"{side}-0"
    before = stack.services[name].ranks()
    was = wait_listed(stack, name, "ready")
    clients = Clients(stack, known)
    with clients.asking():
        clients.wait_answers(CLIENTS)
        before[1].send(signal.SIGSTOP)
        wait_held(stack, side)
        wait_listed(stack, name, None)
        clients.wait_answers(2 * CLIENTS)  # the rank stands still all the while
        before[1].send(signal.SIGCONT)
        now = wait_listed(stack, name, "ready")
        clients.wait_answers(CLIENTS)
    assert not clients.wrong, clients.wrong
    causes = clients.causes()
    assert {reason for reason, _ in causes} == {f"{side}_lost"}, causes
    assert all(f"{side} worker {name}: its turn has not ended for " in text for _, text in causes), causes
    assert was is not None
    assert now is not None
    assert now["incarnation"] == was["incarnation"]
    assert [rank.pid for rank in stack.services[name].ranks()] == [rank.pid for rank in before]
    stack.wait_idle(start)
