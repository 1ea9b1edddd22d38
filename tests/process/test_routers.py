"""Tests of two bootstraps over the same workers: each goes on when the other is killed."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.http import web
from tests.process.stack import READY_S, STOP_S, Service, Stack, running_stack

ONE, OTHER = "bootstrap", "bootstrap-1"
TOKENS = 200
LONG = 1_500
ANSWER_S = 120.0


@pytest.fixture
def stack(demo_model_dir: Path) -> Iterator[Stack]:
    with running_stack(
        str(demo_model_dir),
        bootstrap={"lease_ms": "3000"},
        bootstraps=2,
        dtype="float32",
        kv_cache_memory="256MiB",
    ) as started:
        yield started


def complete(service: Service, tokens: int = 4) -> httpx.Response:
    model = web().get(f"{service.http}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": tokens, "temperature": 0}
    body["ignore_eos"] = True
    return web().post(f"{service.http}/v1/completions", json=body, timeout=ANSWER_S)


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def streaming(service: Service) -> float:
    return service.metrics()["baton_rooms", (("phase", "streaming"),)]


def leases(stack: Stack) -> dict[str, tuple[float, float]]:
    """Return the leases that each worker has, and the bootstraps that it knows, by the worker's name."""
    samples = {name: stack.services[name].metrics() for name in ("prefill-0", "decode-0")}
    names = ("baton_bootstrap_leases", "baton_bootstraps_known")
    return {worker: (found[names[0], ()], found[names[1], ()]) for worker, found in samples.items()}


def rooms_on_workers(stack: Stack) -> float:
    metrics = (stack.services[name].metrics() for name in ("prefill-0", "decode-0"))
    return sum(value for each in metrics for (name, _), value in each.items() if name == "baton_rooms")


@pytest.mark.timeout(300)
def test_opener_owns_a_bootstrap_that_is_killed_takes_its_own_rooms_along_and_no_others(
    stack: Stack,
) -> None:
    one, other = stack.services[ONE], stack.services[OTHER]
    start = stack.idle_gauges()
    assert leases(stack) == dict.fromkeys(("prefill-0", "decode-0"), (2, 2))
    expected = text_of(complete(one, TOKENS))
    assert text_of(complete(other, TOKENS)) == expected

    with ThreadPoolExecutor(4) as clients:
        theirs = [clients.submit(complete, one, LONG) for _ in range(2)]
        ours = [clients.submit(complete, other, TOKENS) for _ in range(2)]
        stack.wait_until(
            lambda: (streaming(one) == 2 and streaming(other)) or _ended(theirs + ours),
            READY_S,
            "the rooms of both are not under way at once",
        )
        one.kill()
        assert [text_of(each.result()) for each in ours] == [expected] * 2
        for each in theirs:
            assert isinstance(each.exception(), httpx.TransportError), "its clients lose their connections"
    stack.wait_until(lambda: rooms_on_workers(stack) == 0, READY_S, "rooms of the killed one go on")
    stack.wait_until(lambda: leases(stack)["decode-0"] == (1, 2), READY_S, "a lease is left")
    assert text_of(complete(other, TOKENS)) == expected, "new ones are served"
    for name in ("prefill-0", "decode-0"):
        ready = web().get(f"{stack.services[name].http}/ready")
        assert ready.status_code == 200
        [note] = ready.json()["notes"]
        assert note.startswith(f"no lease at 127.0.0.1:{stack.grpc_port}: bootstrap unreachable")

    again = stack.restart(ONE)
    stack.wait_ready()
    assert text_of(complete(again, TOKENS)) == expected
    stack.wait_idle(start)


@pytest.mark.timeout(300)
def test_drain_keeps_promises_a_worker_that_leaves_asks_both(stack: Stack) -> None:
    one, other = stack.services[ONE], stack.services[OTHER]
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(complete, each, TOKENS) for each in (one, other)]
        stack.wait_until(
            lambda: (streaming(one) and streaming(other)) or _ended(asked), READY_S, "they are not under way"
        )
        stack.services["decode-0"].process.send_signal(signal.SIGTERM)
        assert len({text_of(each.result()) for each in asked}) == 1
    assert stack.services["decode-0"].process.wait(STOP_S) == 0
    for each in (one, other):
        listed = [worker["name"] for worker in web().get(f"{each.http}/ready").json()["workers"]]
        assert listed == ["prefill-0"], "it has said goodbye to both"


def _ended(asked: list[Future[httpx.Response]]) -> bool:
    """Return whether a request has ended too early for what the test means to see."""
    if any(each.done() for each in asked):
        raise AssertionError("a request ended before all were under way")
    time.sleep(0.005)
    return False
