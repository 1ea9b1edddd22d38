"""Tests of three bootstraps over one pair of workers: each is killed, and stopped, under streams."""

import json
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from tests.http import web
from tests.process.resuming_client import KINDS, ResumingClient
from tests.process.stack import READY_S, STOP_S, Stack, running_stack

NAMES: Final = ("bootstrap", "bootstrap-1", "bootstrap-2")
BEGUN: Final = 4
"""Events that each stream has had when a bootstrap is killed or stopped."""


@pytest.fixture(scope="module")
def stack(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("a key that all bootstraps have\n")
    with running_stack(
        str(demo_model_dir),
        bootstrap={"lease_ms": "3000", "reasoning_key_file": str(key)},
        bootstraps=len(NAMES),
        dtype="float32",
        kv_cache_memory="256MiB",
    ) as running:
        yield running


def clients_of(stack: Stack, first: int) -> list[ResumingClient]:
    """Return a client of each kind, which begins at the bootstrap `first` and goes on at the others."""
    urls = [stack.services[name].http for name in NAMES[first:] + NAMES[:first]]
    model = web().get(f"{urls[0]}/v1/models").json()["data"][0]["id"]
    return [
        ResumingClient(urls, path, json.dumps({"model": model, "stream": True, **body}).encode())
        for path, body in KINDS.values()
    ]


def has_begun(clients: Sequence[ResumingClient]) -> bool:
    return all(len(each.events) >= BEGUN or each.done for each in clients)


def by_choice(events: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return the events of each choice in order. Which choice comes next depends on the time."""
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        choices = event.get("choices") or [{"index": 0}]
        found.setdefault(choices[0]["index"], []).append(event)
    return found


@pytest.mark.parametrize("killed", range(len(NAMES)))
@pytest.mark.timeout(400)
def test_stream_is_prefix_streams_of_a_killed_bootstrap_go_on_at_the_next(stack: Stack, killed: int) -> None:
    start = stack.idle_gauges()
    resuming = clients_of(stack, killed)
    others = clients_of(stack, (killed + 1) % len(NAMES))
    with ThreadPoolExecutor(2 * len(KINDS)) as pool:
        running = [pool.submit(each.run) for each in (*resuming, *others)]
        stack.wait_until(lambda: has_begun(resuming) or _failed(running), READY_S, "streams do not begin")
        stack.services[NAMES[killed]].kill()
        for ended in running:
            ended.result()
    assert sum(each.breaks for each in resuming) >= len(KINDS) // 2, "the kill came in mid-stream"
    assert not any(each.breaks or each.refused for each in others), "streams of others break"
    stack.restart(NAMES[killed])
    stack.wait_ready(url=stack.services[NAMES[killed]].http)

    for kind, each in zip(KINDS, resuming, strict=True):
        assert len(set(each.ids)) == len(each.ids), kind
        again = ResumingClient(each.urls[:1], each.path, each.body).run(after=each.ids[0])
        assert by_choice(each.events[1:]) == by_choice(again.events), kind
        assert not again.breaks, kind
    stack.wait_idle(start)


@pytest.mark.timeout(400)
def test_drain_keeps_promises_bootstraps_that_are_stopped_in_turn_break_no_stream(stack: Stack) -> None:
    start = stack.idle_gauges()
    for stopped, name in enumerate(NAMES):
        clients = clients_of(stack, stopped)
        with ThreadPoolExecutor(len(KINDS)) as pool:
            running = [pool.submit(each.run) for each in clients]
            stack.wait_until(lambda: has_begun(clients) or _failed(running), READY_S, "streams do not begin")  # noqa: B023
            stack.services[name].process.send_signal(signal.SIGTERM)
            for ended in running:
                ended.result()
        assert not any(each.breaks for each in clients), name
        assert stack.services[name].process.wait(STOP_S) == 0
        stack.restart(name)
        stack.wait_ready(url=stack.services[name].http)
    stack.wait_idle(start)


def _failed(running: Sequence[Future[ResumingClient]]) -> bool:
    """Raise the error of a stream that has ended with one. Return False."""
    for each in running:
        if each.done():
            each.result()
    return False
