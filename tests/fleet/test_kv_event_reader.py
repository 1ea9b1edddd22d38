"""Tests of the reader of a worker's KV event log, under loss, repetition and reordering."""

import random
from collections.abc import Iterator

import pytest

from baton.fleet.kv_event_reader import KvEventReader, digest_of
from baton.ids import PageId
from baton.pages import kv_event_log
from baton.pages.block_hashes import BLOCK_TOKENS
from baton.pages.kv_event_log import KvEvent, KvEventLog, KvEvents, KvSnapshotPart

ROOT = -1
BLOCKS_MAX = 1_000
Message = KvEvents | KvSnapshotPart


class Worker:
    """A log of single blocks, and what was cached after each of its events."""

    def __init__(self, rng: random.Random, events_max: int) -> None:
        self._rng = rng
        self._pages: list[PageId] = []
        self._next = 0
        self.log = KvEventLog(BLOCK_TOKENS, events_max)
        self.after: dict[int, frozenset[bytes]] = {0: frozenset()}
        self.log.on_event.add(self._note)

    def change(self) -> None:
        """Add a block to the cache, or remove one."""
        if self._pages and self._rng.random() < 0.4:
            self.log.hidden(self._pages.pop(self._rng.randrange(len(self._pages))))
            return
        self._pages.append(PageId(self._next))
        tokens = [self._rng.randrange(40)] * BLOCK_TOKENS
        self.log.stored(ROOT, self._pages[-1], tokens, 0)
        self._next += 1

    def _note(self) -> None:
        blocks = {block for part in self.log.snapshot() for block in part.blocks}
        self.after[self.log.number] = frozenset(blocks)


def read(reader: KvEventReader, message: Message) -> None:
    """Let the reader take a message, and check that the change that it reports is the one of its set."""
    before = set(reader.blocks)
    change = reader.read_events(message) if isinstance(message, KvEvents) else reader.read_part(message)
    assert change.stored == reader.blocks - before
    assert change.removed == before - reader.blocks
    assert not change.passed & (before | reader.blocks)


def messages(worker: Worker, rng: random.Random, reader: KvEventReader) -> Iterator[Message]:
    """Yield what the worker sends next: what the reader asks for, or something else that it may send."""
    number = rng.choice((reader.number, rng.randrange(worker.log.number + 1)))
    events = worker.log.after(number) if reader.is_current or rng.random() < 0.3 else None
    yield from worker.log.snapshot() if events is None else (events,)


@pytest.mark.parametrize("seed", range(150))
def test_log_is_tree_under_any_loss_repetition_and_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is lost, repeated or overtaken: the reader has the worker's set, or knows that it has not."""
    monkeypatch.setattr(kv_event_log, "BATCH_MAX", 3)
    rng = random.Random(seed)
    worker, reader = Worker(rng, events_max=12), KvEventReader(BLOCKS_MAX)
    on_the_way: list[Message] = []
    lost, doubled = rng.random() * 0.5, rng.random() * 0.5
    was_current = 0
    for _ in range(300):
        for _ in range(rng.randrange(4)):
            worker.change()
        for message in messages(worker, rng, reader):
            copies = (rng.random() >= lost) + (rng.random() < doubled)
            on_the_way += [message] * copies
        for _ in range(rng.randrange(len(on_the_way) + 1)):
            at = rng.randrange(len(on_the_way)) if rng.random() < 0.3 else 0
            read(reader, on_the_way.pop(at))
            if reader.is_current:
                was_current += 1
                assert reader.blocks == worker.after[reader.number]
    while (batch := worker.log.after(reader.number) if reader.is_current else None) is None or batch.events:
        for message in worker.log.snapshot() if batch is None else [batch]:
            read(reader, message)
    assert reader.blocks == worker.after[worker.log.number], "without loss it gets there"
    assert was_current > 10


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def current(*numbers: int, at: int = 5, blocks_max: int = BLOCKS_MAX) -> KvEventReader:
    """Return a reader that has these blocks after event `at`."""
    reader = KvEventReader(blocks_max)
    blocks = [block(each) for each in numbers]
    reader.read_part(KvSnapshotPart(at, 0, 1, blocks, digest_of(blocks)))
    assert reader.is_current
    return reader


def stored(first: int, *numbers: int, cached: tuple[int, ...]) -> KvEvents:
    """Return events that these blocks are stored. `cached`: all blocks that are cached after them."""
    events = [KvEvent(is_stored=True, block=block(each)) for each in numbers]
    return KvEvents(first, events, digest_of(map(block, cached)))


def test_a_new_reader_has_nothing_and_needs_a_snapshot() -> None:
    reader = KvEventReader(BLOCKS_MAX)
    reader.read_events(stored(1, 7, cached=(7,)))
    assert not reader.is_current
    assert not reader.blocks


def test_log_is_tree_a_gap_is_noticed_and_what_was_known_stays_an_estimate() -> None:
    reader = current(1, 2)
    reader.read_events(stored(7, 3, cached=(1, 2, 3)))
    assert not reader.is_current
    assert reader.blocks == {block(1), block(2)}


def test_log_is_tree_an_idle_log_shows_that_events_were_lost() -> None:
    reader = current(1, 2)
    reader.read_events(KvEvents(6, (), digest_of((block(1), block(2)))))
    assert reader.is_current
    reader.read_events(KvEvents(7, (), digest_of((block(1),))))
    assert not reader.is_current


def test_log_is_tree_a_wrong_digest_is_noticed_in_events_and_in_a_snapshot() -> None:
    reader = current(1, 2)
    reader.read_events(stored(6, 3, cached=(1, 3)))
    assert not reader.is_current
    reader.read_part(KvSnapshotPart(9, 0, 1, [block(1)], digest_of((block(2),))))
    assert not reader.is_current
    reader.read_part(KvSnapshotPart(9, 0, 1, [block(2)], digest_of((block(2),))))
    assert reader.is_current


def test_log_is_tree_events_that_overlap_are_applied_once() -> None:
    reader = current(1)
    reader.read_events(stored(6, 2, 3, cached=(1, 2, 3)))
    reader.read_events(stored(7, 3, 4, cached=(1, 2, 3, 4)))
    assert reader.is_current
    assert reader.blocks == set(map(block, (1, 2, 3, 4)))


def test_log_is_tree_parts_of_two_snapshots_are_not_mixed() -> None:
    reader = KvEventReader(BLOCKS_MAX)
    digest = digest_of((block(1), block(2)))
    reader.read_part(KvSnapshotPart(5, 0, 2, [block(1)], digest))
    reader.read_part(KvSnapshotPart(6, 1, 2, [block(2)], digest))
    assert not reader.is_current
    reader.read_part(KvSnapshotPart(5, 1, 2, [block(2)], digest))
    assert not reader.is_current, "the older one is given up"
    reader.read_part(KvSnapshotPart(6, 0, 2, [block(1)], digest))
    assert reader.is_current
    assert reader.number == 6


def test_a_newer_snapshot_replaces_what_is_known_and_an_older_one_does_not() -> None:
    reader = current(1, at=5)
    reader.read_part(KvSnapshotPart(4, 0, 1, [block(2)], digest_of((block(2),))))
    assert reader.blocks == {block(1)}
    reader.read_part(KvSnapshotPart(8, 0, 1, [block(3)], digest_of((block(3),))))
    assert (reader.blocks, reader.number, reader.is_current) == ({block(3)}, 8, True)


def test_malformed_is_contained_a_log_larger_than_the_cache_is_not_believed() -> None:
    reader = KvEventReader(blocks_max=2)
    blocks = [block(each) for each in range(3)]
    reader.read_part(KvSnapshotPart(5, 0, 1, blocks, digest_of(blocks)))
    assert not reader.is_current
    assert not reader.blocks
    reader = current(1, 2, blocks_max=2)
    reader.read_events(stored(6, 3, cached=(1, 2, 3)))
    assert not reader.is_current
