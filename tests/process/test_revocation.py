"""Tests of a prefill worker that stays stopped: the decode worker gets its memory back."""

import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tests.http import web
from tests.process.stack import SPLIT, Service, Stack, running_stack

ANSWER_S = 90.0
LONG = [7] * 800
QUARANTINED = ("baton_kv_pages", (("state", "quarantined"),))


def complete(stack: Stack, prompt: Any) -> httpx.Response:
    model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return web().post(f"{stack.url}/v1/completions", json=body, timeout=ANSWER_S)


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def busy(prefills: list[Service]) -> Service:
    """Return the worker that has begun to compute."""
    before = [each.total("baton_prefill_tokens_total") for each in prefills]
    give_up = time.monotonic() + ANSWER_S
    while time.monotonic() < give_up:
        for each, count in zip(prefills, before, strict=True):
            if each.total("baton_prefill_tokens_total") > count:
                return each
    raise AssertionError("nobody computes")


def test_pages_of_a_prefill_worker_that_stays_stopped_are_taken_back_and_it_may_return(
    demo_model_dir: Path,
) -> None:
    with running_stack(
        str(demo_model_dir),
        prefill=[{"chunk_tokens": "64"}] * 2,
        decode=[{"revoke_after_ms": "1000", **SPLIT}],
        dtype="float32",
        kv_cache_memory="256MiB",
        prefix_cache="false",  # the long prompt is to be computed each time it is asked
    ) as stack:
        start = stack.idle_gauges()
        decode, prefills = stack.services["decode-0"], [stack.services[f"prefill-{n}"] for n in range(2)]
        right = text_of(complete(stack, LONG))
        replies: list[httpx.Response] = []
        asker = threading.Thread(target=lambda: replies.append(complete(stack, LONG)))
        asker.start()
        stopped = busy(prefills)
        stopped.process.send_signal(signal.SIGSTOP)

        stack.wait_until(lambda: decode.gauges()[QUARANTINED] > 0, ANSWER_S)
        stack.wait_until(lambda: decode.total("baton_kv_revocations_total") == 1, ANSWER_S)
        stack.wait_until(lambda: decode.gauges()[QUARANTINED] == 0, ANSWER_S)
        asker.join(ANSWER_S)
        assert text_of(replies[0]) == right, "the other prefill worker took the request over"
        assert "Paris" in text_of(complete(stack, "The capital of France is"))

        stopped.process.send_signal(signal.SIGCONT)
        stack.wait_ready(3)
        stack.wait_until(lambda: serves(stopped, stack), ANSWER_S)
        stack.wait_idle(start)
        assert decode.total("baton_kv_revocations_total") == 1, "once"
        assert set(stack.stop().values()) == {0}, stack.tails()


def serves(prefill: Service, stack: Stack) -> bool:
    """Check that a request is answered rightly, and that this worker computed its prompt."""
    before = prefill.total("baton_prefill_tokens_total")
    assert "Paris" in text_of(complete(stack, "The capital of France is"))
    return prefill.total("baton_prefill_tokens_total") > before
