"""Tests of late reads: what vLLM's NixlConnector and Baton's stack answer behind the same 32 seconds.

Prefill has computed a prompt, and its peer comes for the KV cache, or goes on, 32 s later. vLLM frees the
memory after a lease of 30 s. `docs/late_read/late_read.py` is the experiment with vLLM alone.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from docs.late_read.late_read import AT_A_TIME, OTHER_PROMPT, OTHERS, PROMPT
from tests.http import web
from tests.ports import free_neighbours
from tests.process.stack import SPLIT, Stack, running_stack

ROOT: Final = Path(__file__).parents[2]
SCRIPT: Final = ROOT / "docs" / "late_read" / "late_read.py"
WAIT_S: Final = 32
"""Seconds: more than the default lease of vLLM's connector."""
LONG_LEASE_S: Final = 3600
"""Seconds: longer than the tests run."""
RUN_S: Final = 600.0
ANSWER_S: Final = 150.0
POLL_S: Final = 0.002
TRIES: Final = 20
LATE: Final = ("late", "decode stopped")
CHANGED: Final = (
    "vLLM does not answer a late read with another prompt's text any more: docs/late-reads.md, README.md and"
    " docs/compare.md have to be changed"
)

Answer = dict[str, Any]


def run_vllm(model: Path, *options: str) -> dict[str, Answer]:
    """Return the answers of the pair of vLLM processes, by experiment."""
    command = [sys.executable, str(SCRIPT), str(model), "--wait", str(WAIT_S), *options]
    command += ["--first-port", str(free_neighbours(2))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {each["experiment"]: each for each in answers}


@pytest.fixture(scope="module")
def default_lease(demo_model_dir: Path) -> dict[str, Answer]:
    return run_vllm(demo_model_dir)


@pytest.fixture(scope="module")
def long_lease(demo_model_dir: Path) -> dict[str, Answer]:
    return run_vllm(demo_model_dir, "--lease", str(LONG_LEASE_S))


@pytest.mark.timeout(RUN_S)
def test_vllms_connector_is_right_when_the_decode_leg_comes_at_once(default_lease: dict[str, Answer]) -> None:
    """The control: the hand-over itself changes no token."""
    assert default_lease["at once"]["token_ids"] == default_lease["alone"]["token_ids"]
    assert default_lease["alone"]["text"].startswith(" Paris.")


@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize("experiment", LATE)
def test_vllms_connector_answers_a_late_read_with_another_prompts_text_and_no_error(
    default_lease: dict[str, Answer], experiment: str
) -> None:
    """Fails, and tells which pages to change, once vLLM answers otherwise."""
    answer = default_lease[experiment]
    assert answer["finish_reason"] == "length", CHANGED
    assert "Paris" not in answer["text"], CHANGED
    assert "cake" in answer["text"], CHANGED


@pytest.mark.all_models
@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize("experiment", LATE)
def test_a_lease_that_is_longer_than_the_delay_makes_vllms_connector_right(
    long_lease: dict[str, Answer], experiment: str
) -> None:
    assert long_lease[experiment]["token_ids"] == long_lease["alone"]["token_ids"]


@pytest.fixture(scope="module")
def stack(demo_model_dir: Path) -> Iterator[Stack]:
    """One prefill and one decode worker, which computes no prompt itself while prefill is there."""
    with running_stack(
        str(demo_model_dir),
        prefill=[{"chunk_tokens": "32"}],
        decode=[SPLIT],
        dtype="float32",
        kv_cache_memory="32MiB",
        prefix_cache="false",  # the prompt is to be handed over each time
        by_commands=True,
        engine="vllm",
        page_tokens="32",
    ) as started:
        yield started


def complete(stack: Stack, prompt: str) -> str:
    model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    reply = web().post(f"{stack.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=ANSWER_S)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


class Requests:
    """Requests that run beside the test."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._threads: list[threading.Thread] = []
        self.texts: dict[str, set[str]] = {}
        """Answers by prompt."""
        self.failures: list[str] = []

    def start(self, prompt: str) -> None:
        self._threads.append(threading.Thread(target=self._complete, args=(prompt,)))
        self._threads[-1].start()

    def join(self) -> None:
        for each in self._threads:
            each.join(ANSWER_S)
            assert not each.is_alive(), self._stack.tails()

    def _complete(self, prompt: str) -> None:
        try:
            self.texts.setdefault(prompt, set()).add(complete(self._stack, prompt))
        except Exception as error:
            self.failures.append(repr(error))


def stop_in_a_hand_over(stack: Stack, side: str, requests: Requests) -> None:
    """Stop the worker of `side` while prefill holds the room of a request for PROMPT."""
    prefill, stopped = stack.services["prefill-0"], stack.services[f"{side}-0"].process
    for _ in range(TRIES):
        before = prefill.total("baton_prefill_tokens_total")
        requests.start(PROMPT)
        give_up = time.monotonic() + ANSWER_S
        while prefill.total("baton_prefill_tokens_total") == before:
            assert time.monotonic() < give_up, stack.tails()
            time.sleep(POLL_S)
        stopped.send_signal(signal.SIGSTOP)
        if is_handing_over(stack, side):
            return
        stopped.send_signal(signal.SIGCONT)
        requests.join()
    raise AssertionError("no hand-over was met")


def is_handing_over(stack: Stack, stopped: str) -> bool:
    """Return whether the worker that goes on waits for the stopped one."""
    if stopped == "decode":
        gauges = stack.services["prefill-0"].gauges()
        phases = ("waiting_for_input", "transferring", "sealing")
        return sum(gauges["baton_rooms", (("phase", phase),)] for phase in phases) > 0
    return stack.services["decode-0"].gauges()["baton_kv_pages", (("state", "exposed"),)] > 0


@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize("stopped", ["prefill", "decode"])
def test_batons_stack_is_right_when_a_worker_stands_still_for_as_long(stack: Stack, stopped: str) -> None:
    right = {prompt: {complete(stack, prompt)} for prompt in (PROMPT, OTHER_PROMPT)}
    assert all(text.startswith(" Paris.") for text in right[PROMPT])
    start = stack.idle_gauges()
    requests = Requests(stack)
    stop_in_a_hand_over(stack, stopped, requests)
    try:
        time.sleep(WAIT_S)
        for _ in range(OTHERS // AT_A_TIME):
            requests.start(OTHER_PROMPT)
    finally:
        stack.services[f"{stopped}-0"].process.send_signal(signal.SIGCONT)
    requests.join()
    assert requests.failures == []
    assert requests.texts == right
    stack.wait_ready(2)
    stack.wait_idle(start)
