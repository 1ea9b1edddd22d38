"""What becomes of a worker that stood still for so long that another has its name, when it goes on?"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.runtime.errors import EXIT_FAILED
from tests.http import web
from tests.models.eight_heads import eight_heads
from tests.process.stack import STOP_S, Stack, running_stack
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


@pytest.mark.timeout(240)
def test_it_ends_itself_with_one_line_and_does_not_disturb_its_successor(stack: Stack) -> None:
    answered(stack)
    was = stack.services["prefill-0"]
    stack.forget("prefill-0")
    was.process.send_signal(signal.SIGSTOP)
    try:
        wait_listed(stack, "prefill-0", None)
        stack.start_worker("prefill", "prefill-0", **stack.common)
        stack.wait_ready(2)
        was.process.send_signal(signal.SIGCONT)
        assert was.process.wait(STOP_S) == EXIT_FAILED
    finally:
        was.kill()  # the stack knows its successor alone
    assert sum(SAYS in line for line in was.log.read_text(errors="replace").splitlines()) == 1
    answered(stack)
