"""Tests of rooms that go on when their bootstrap is killed, and that another bootstrap adopts."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from tests.http import web
from tests.process.stack import READY_S, Stack, running_stack
from tests.process.stream_reader import Broken, StreamReader, plain_http
from tests.process.streamed_requests import DRAWN, by_choice, chat

NAMES: Final = ("bootstrap", "bootstrap-1")
LONG: Final[dict[str, Any]] = {"max_tokens": 120, "min_tokens": 120, **DRAWN}
SEVERAL: Final[dict[str, Any]] = {**LONG, "n": 3, "max_tokens": 60, "min_tokens": 60}
BEGUN: Final = 4
"""Events that a stream has had when its bootstrap is killed."""
ORPHAN_MS: Final = 3_000


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
        orphan_ms=str(ORPHAN_MS),
    ) as running:
        yield running


def total(stack: Stack, name: str, worker: str = "decode-0") -> float:
    return stack.services[worker].total(name)


def urls(stack: Stack) -> list[str]:
    return [stack.services[name].http for name in NAMES]


def reader(stack: Stack, fields: dict[str, Any]) -> StreamReader:
    model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    request = chat(**fields)
    return StreamReader(plain_http(request.path, request.encode(model)))


def wait_begun(stack: Stack, reading: StreamReader, running: Future[Any]) -> None:
    stack.wait_until(
        lambda: len(reading.events) >= BEGUN or running.done(), READY_S, "the stream does not begin"
    )


@pytest.mark.parametrize("fields", [LONG, SEVERAL], ids=["one", "several"])
@pytest.mark.timeout(300)
def test_adopt_first_wins_a_resumed_stream_goes_on_in_the_room_of_the_killed_bootstrap(
    stack: Stack, fields: dict[str, Any]
) -> None:
    start = stack.idle_gauges()
    computed = total(stack, "baton_prefill_tokens_total", "prefill-0")
    adopted = total(stack, "baton_rooms_adopted_total")
    resuming = reader(stack, fields)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(resuming.run, urls(stack))
        wait_begun(stack, resuming, running)
        once = total(stack, "baton_prefill_tokens_total", "prefill-0")
        stack.services[NAMES[0]].kill()
        running.result()
    assert resuming.breaks == 1
    assert total(stack, "baton_rooms_adopted_total") == adopted + 1
    assert computed < total(stack, "baton_prefill_tokens_total", "prefill-0") == once, "no prompt anew"
    stack.restart(NAMES[0])
    stack.wait_ready(url=stack.services[NAMES[0]].http)
    again = StreamReader(resuming.connect).run(urls(stack)[:1], after=resuming.ids[0])
    assert by_choice(resuming.events[1:]) == by_choice(again.events)
    assert total(stack, "baton_rooms_adopted_total") == adopted + 1, "that room is over"
    stack.wait_idle(start)


@pytest.mark.timeout(300)
def test_orphan_ends_a_room_that_nobody_adopts_gives_its_pages_back(stack: Stack) -> None:
    start = stack.idle_gauges()
    orphaned = total(stack, "baton_rooms_orphaned_total")
    left = reader(stack, {**LONG, "max_tokens": 600, "min_tokens": 600})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(left.read, stack.url)
        wait_begun(stack, left, running)
        stack.services[NAMES[0]].kill()
        with pytest.raises(Broken):
            running.result()
    stack.wait_until(
        lambda: total(stack, "baton_rooms_orphaned_total") == orphaned + 1, READY_S, "the room is no orphan"
    )
    stack.restart(NAMES[0])
    stack.wait_ready(url=stack.services[NAMES[0]].http)
    stack.wait_idle(start)
    [ended] = [
        value
        for (name, labels), value in stack.services["decode-0"].metrics().items()
        if name == "baton_rooms_failed_total" and ("reason", "orphaned") in labels
    ]
    assert ended == 1
