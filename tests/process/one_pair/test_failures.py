"""Tests of a client's view when part of the only pair is killed, stopped or told to leave.

`tests/process/test_failover.py` has the same with a second pair.
"""

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.http import web
from tests.process.one_pair.conftest import LEASE_MS
from tests.process.stack import Stack

ANSWER_S = 60.0
LONG = 2_800


def complete(stack: Stack, prompt: str = "The capital of France is", **more: Any) -> httpx.Response:
    body = {"model": model_of(stack), "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
    return web().post(f"{stack.url}/v1/completions", json=body, timeout=ANSWER_S)


def model_of(stack: Stack) -> str:
    name: str = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    return name


def events_until_end(stack: Stack, on_event: Any, **more: Any) -> list[dict[str, Any]]:
    """Stream a long completion, calling `on_event(count)` after each chunk; the events that came."""
    body = {
        "model": model_of(stack),
        "prompt": "Count: 1 2 3 4 5 6 7 8 9",
        "max_tokens": 2000,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        **more,
    }
    events: list[dict[str, Any]] = []
    with web().stream("POST", f"{stack.url}/v1/completions", json=body, timeout=ANSWER_S) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line[6:]))
                on_event(len(events))
    return events


def test_with_no_pair_left_a_killed_decode_workers_cause_reaches_the_client_and_a_restarted_one_serves(
    breakable: Stack,
) -> None:
    start = breakable.idle_gauges()

    def kill(count: int) -> None:
        if count == 5:
            breakable.services["decode-0"].kill()

    error = events_until_end(breakable, kill)[-1]["error"]
    assert "decode-0" in error["message"], error
    assert error["message"].endswith("not retried: no decode worker is ready"), error
    assert error["code"] == "decode_lost"
    breakable.restart("decode-0")
    breakable.wait_ready()
    answer = complete(breakable)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["text"]
    breakable.wait_idle(start)


@contextmanager
def long_prompt_in_prefill(stack: Stack, **more: Any) -> Iterator[list[httpx.Response]]:
    """Keep prefill busy with a long prompt while the body runs. The yielded list has its reply afterwards."""
    prefill = stack.services["prefill-0"]
    before = prefill.total("baton_prefill_tokens_total")
    body = {"model": model_of(stack), "prompt": [7] * LONG, "max_tokens": 4, "temperature": 0, **more}
    replies: list[httpx.Response] = []

    def ask() -> None:
        replies.append(web().post(f"{stack.url}/v1/completions", json=body, timeout=ANSWER_S))

    asker = threading.Thread(target=ask)
    asker.start()
    while prefill.total("baton_prefill_tokens_total") == before:
        assert asker.is_alive(), replies[0].text
    yield replies
    asker.join(ANSWER_S)


def test_with_no_pair_left_what_prefill_was_killed_over_is_answered_by_decode_alone(breakable: Stack) -> None:
    start = breakable.idle_gauges()
    with long_prompt_in_prefill(breakable) as replies:
        breakable.services["prefill-0"].kill()
    assert replies[0].status_code == 200, replies[0].text
    assert "Paris" in complete(breakable).json()["choices"][0]["text"]
    assert web().get(f"{breakable.url}/ready").json()["slower"]
    breakable.restart("prefill-0")
    breakable.wait_ready()
    assert complete(breakable).status_code == 200
    breakable.wait_idle(start)


def test_a_stopped_prefill_leaves_its_destination_in_quarantine_until_it_is_quiet(breakable: Stack) -> None:
    """Silence proves nothing, so the pages that prefill may still write to are given to no other room."""
    start = breakable.idle_gauges()
    prefill, decode = breakable.services["prefill-0"], breakable.services["decode-0"]
    # Decode does not compute what is scored, and holds nothing of this salt.
    with long_prompt_in_prefill(breakable, prompt_logprobs=1, cache_salt="of its own") as replies:
        prefill.process.send_signal(signal.SIGSTOP)
    assert replies[0].status_code == 503, replies[0].text
    assert "lease" in replies[0].json()["error"]["message"]
    quarantined = ("baton_kv_pages", (("state", "quarantined"),))
    deadline = time.monotonic() + ANSWER_S
    while decode.gauges()[quarantined] != LONG // 16:
        assert time.monotonic() < deadline, decode.gauges()
    prefill.process.send_signal(signal.SIGCONT)
    breakable.wait_ready()
    assert complete(breakable).status_code == 200
    breakable.wait_idle(start)


def test_a_stopped_decode_worker_loses_its_lease_and_comes_back(breakable: Stack) -> None:
    start = breakable.idle_gauges()
    decode = breakable.services["decode-0"]

    def stop(count: int) -> None:
        if count == 5:
            decode.process.send_signal(signal.SIGSTOP)

    events = events_until_end(breakable, stop)
    assert "decode-0" in events[-1]["error"]["message"]
    assert "lease" in events[-1]["error"]["message"]
    decode.process.send_signal(signal.SIGCONT)
    breakable.wait_ready()
    assert complete(breakable).status_code == 200
    breakable.wait_idle(start)


def test_a_stack_that_stood_still_as_a_whole_loses_nothing(breakable: Stack) -> None:
    """A machine was paused, or had no time for Baton. No worker was silent while the bootstrap listened."""
    start = breakable.idle_gauges()
    processes = [service.process for service in breakable.services.values()]
    bootstrap = breakable.services["bootstrap"]

    def pause(count: int) -> None:
        if count == 5:
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            time.sleep(2 * LEASE_MS / 1000)
            for process in processes:
                process.send_signal(signal.SIGCONT)

    before = bootstrap.total("baton_workers_lost_total")
    events = events_until_end(breakable, pause, max_tokens=200)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert bootstrap.total("baton_workers_lost_total") == before
    breakable.wait_idle(start)


def test_the_bootstrap_restarts_and_workers_find_it_again(breakable: Stack) -> None:
    start = breakable.idle_gauges()
    breakable.services["bootstrap"].kill()
    breakable.restart("bootstrap")
    breakable.wait_ready()
    assert complete(breakable).status_code == 200
    breakable.wait_idle(start)


def test_a_worker_that_does_not_fit_is_refused_by_field_and_keeps_running(breakable: Stack) -> None:
    start = breakable.idle_gauges()
    odd = breakable.start_worker("decode", "decode-odd", page_tokens="24")
    try:
        problems: list[str] = []
        while not any("page_tokens" in problem for problem in problems):
            assert odd.process.poll() is None, odd.tail()
            try:
                problems = web().get(f"{odd.http}/ready", timeout=5).json().get("problems", [])
            except httpx.TransportError:
                problems = []
        assert complete(breakable).status_code == 200
    finally:
        odd.stop()
        del breakable.services["decode-odd"]
    breakable.wait_idle(start)
