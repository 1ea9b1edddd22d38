"""Tests of KV events in vLLM's format, without sockets. tests/vllm reads them by vLLM's own types."""

import pytest

from baton.ids import PageId
from baton.runtime.errors import StartupError
from baton.worker import kv_event_publisher
from baton.worker.kv_event_publisher import KvEventPublisher, VllmKvEvents

BLOCK = 4
ROOT = -1
PROMPT = tuple(range(5 * BLOCK))


def store(events: VllmKvEvents, first: int, last: int) -> None:
    """Store blocks of one prompt, each below the last one."""
    for page in range(first, last):
        events.stored(PageId(page - 1) if page else ROOT, PageId(page), PROMPT, page * BLOCK)


def test_a_prompts_blocks_are_one_event_of_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_publisher, "RUN_MAX", 3)
    events = VllmKvEvents(BLOCK)
    store(events, 0, 5)
    cleared, first, second = events.take()
    assert cleared == {"type": "AllBlocksCleared"}
    assert first["token_ids"] + second["token_ids"] == list(PROMPT)
    assert (len(first["block_hashes"]), len(second["block_hashes"])) == (3, 2)
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert not events.changed.is_set()


def test_a_block_below_one_that_was_published_before_is_an_event_of_its_own() -> None:
    events = VllmKvEvents(BLOCK)
    store(events, 0, 2)
    [_, first] = events.take()
    store(events, 2, 3)
    [second] = events.take()
    assert second["parent_block_hash"] == first["block_hashes"][1]
    events.hidden(PageId(2))
    events.hidden(PageId(2))
    assert events.take() == [
        {"type": "BlockRemoved", "block_hashes": second["block_hashes"], "medium": "GPU"}
    ]


def test_same_root_only_blocks_under_a_salt_and_below_them_are_left_out() -> None:
    events = VllmKvEvents(BLOCK)
    events.take()
    events.stored(-8, PageId(0), PROMPT, 0)
    store(events, 1, 2)
    events.hidden(PageId(0))
    assert events.take() == []


def test_what_nobody_takes_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_publisher, "EVENTS_MAX", 2)
    events = VllmKvEvents(BLOCK)
    for page in range(3):
        events.stored(ROOT, PageId(page), (page,) * BLOCK, 0)
    assert events.dropped == 1
    assert len(events.take()) == 2


def test_without_its_packages_the_error_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_publisher, "PACKAGES", {"no_such_module": "pyzmq"})
    with pytest.raises(StartupError, match="pip install pyzmq"):
        KvEventPublisher(VllmKvEvents(BLOCK), "tcp://*:0", "", "")
