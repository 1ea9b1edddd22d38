"""Tests that each of three bootstraps explains the requests of all, and names those that do not answer."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cli.typed import forked_baton
from tests.http import web
from tests.process.stack import READY_S, Service, Stack, running_stack

NAMES: Final = ("bootstrap", "bootstrap-1", "bootstrap-2")
ANSWER_S: Final = 120.0


@pytest.fixture(scope="module")
def stack(demo_model_dir: Path) -> Iterator[Stack]:
    with running_stack(
        str(demo_model_dir), bootstraps=len(NAMES), dtype="float32", kv_cache_memory="256MiB"
    ) as running:
        yield running


def complete(service: Service, request_id: str) -> None:
    model = web().get(f"{service.http}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 4}
    headers = {"X-Request-Id": request_id}
    reply = web().post(f"{service.http}/v1/completions", json=body, headers=headers, timeout=ANSWER_S)
    assert reply.status_code == 200, reply.text


def address_of(stack: Stack, name: str) -> str:
    """Return the gRPC address of a bootstrap."""
    return stack.bootstraps.split(",")[NAMES.index(name)]


def told(service: Service, *command: str) -> Any:
    """Return the JSON that a command of `baton` prints about the stack, as one bootstrap shows it."""
    done = forked_baton(*command, "--url", service.http, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(400)
def test_each_bootstrap_explains_the_requests_of_all_and_names_who_does_not_answer(stack: Stack) -> None:
    start = stack.idle_gauges()
    first, second, third = (stack.services[name] for name in NAMES)
    addresses = {name: address_of(stack, name) for name in NAMES}
    complete(first, "at-the-first")
    complete(second, "at-the-second")

    story = told(second, "explain", "cmpl-at-the-first")
    assert (story["state"], story["bootstrap"]) == ("answered", addresses["bootstrap"])
    assert story["unanswered"] == []
    printed = forked_baton("explain", "at-the-first", "--url", third.http)
    assert f"From the bootstrap {addresses['bootstrap']}." in printed.stdout
    live = told(third, "top")
    assert live["bootstraps"][0]["address"] == addresses["bootstrap-2"]
    assert {row["address"] for row in live["bootstraps"]} == set(addresses.values())
    where = {each["request_id"]: each["bootstrap"] for each in live["requests"]}
    assert where == {"at-the-first": addresses["bootstrap"], "at-the-second": addresses["bootstrap-1"]}

    third.process.send_signal(signal.SIGSTOP)
    silent = f"Bootstrap {addresses['bootstrap-2']} did not answer within 1 s."
    story = told(second, "explain", "at-the-first")
    assert (story["bootstrap"], story["unanswered"]) == (addresses["bootstrap"], [silent])
    live = told(second, "top")
    assert (len(live["bootstraps"]), live["unanswered"]) == (2, [silent])
    third.process.send_signal(signal.SIGCONT)
    stack.wait_until(lambda: not told(second, "top")["unanswered"], READY_S, "the third is never back")

    first.kill()
    done = forked_baton("explain", "at-the-first", "--url", second.http)
    assert done.returncode == 1
    assert (
        f"Nothing is kept of request 'at-the-first' here, nor at {addresses['bootstrap-2']}." in done.stderr
    )
    assert f"Bootstrap {addresses['bootstrap']} did not answer" in done.stderr
    assert "It may know the request." in done.stderr
    stack.restart("bootstrap")
    stack.wait_ready(url=stack.services["bootstrap"].http)
    stack.wait_until(lambda: not told(second, "top")["unanswered"], READY_S, "the first is never back")
    assert len(told(second, "top")["bootstraps"]) == len(NAMES)
    stack.wait_idle(start)
