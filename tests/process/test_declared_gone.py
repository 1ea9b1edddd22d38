"""Tests of workers that stood still until another process got their name, and then go on."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.runtime.errors import EXIT_FAILED
from tests.http import web
from tests.models.eight_heads import eight_heads
from tests.process.stack import STOP_S, Service, Stack, running_stack
from tests.process.test_stopped_rank import wait_listed

SAYS = "prefill-0 was declared gone while it lives"


@pytest.fixture
def stack(demo_model_dir: Path, tmp_path: Path) -> Iterator[Stack]:
    with running_stack(
        str(eight_heads(tmp_path, demo_model_dir)),
        bootstrap={"lease_ms": "1000"},
        dtype="float32",
        kv_cache_memory="8MiB",
    ) as started:
        yield started


def answered(stack: Stack) -> None:
    body = {"model": Path(stack.model).name, "prompt": [5, 7, 9], "max_tokens": 4, "temperature": 0}
    assert web().post(f"{stack.url}/v1/completions", json=body, timeout=60).status_code == 200


@contextmanager
def succeeded(stack: Stack, *, reported: bool) -> Iterator[Service]:
    """Stop a worker while another one gets its name. `reported`: by a starter that is mistaken."""
    answered(stack)
    was = stack.services["prefill-0"]
    stack.forget("prefill-0")
    was.process.send_signal(signal.SIGSTOP)
    try:
        wait_listed(stack, "prefill-0", None)
        assert stack.report_exit("prefill-0", was.process.pid, b"of nobody who started it") == "NotProven"
        if reported:
            assert stack.report_exit("prefill-0", was.process.pid, was.exit_secret) == "OK"
        stack.start_worker("prefill", "prefill-0", **stack.common)
        stack.wait_ready(2)
        yield was
    finally:
        was.kill()  # the stack knows its successor alone


@pytest.mark.timeout(240)
def test_one_that_was_declared_gone_ends_itself_with_one_line_and_does_not_disturb_its_successor(
    stack: Stack,
) -> None:
    with succeeded(stack, reported=True) as was:
        was.process.send_signal(signal.SIGCONT)
        assert was.process.wait(STOP_S) == EXIT_FAILED
    assert sum(SAYS in line for line in was.log.read_text(errors="replace").splitlines()) == 1
    answered(stack)


@pytest.mark.timeout(240)
def test_exit_by_starter_one_whose_name_another_has_is_not_declared_gone_and_says_goodbye_itself(
    stack: Stack,
) -> None:
    """The process is not registered, because its name is in use."""
    with succeeded(stack, reported=False) as was:
        was.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + STOP_S
        while "is held by incarnation" not in was.log.read_text(errors="replace"):
            assert was.process.poll() is None, was.tail()
            assert time.monotonic() < deadline, was.tail()
            time.sleep(0.05)
        answered(stack)
        assert was.stop() == 0
    assert SAYS not in was.log.read_text(errors="replace")
    answered(stack)
