"""Tests of the log of a prefix tree: it has what lookups find, in numbered events and in snapshots."""

import random
from itertools import count

import pytest

from baton.ids import PageId
from baton.pages.block_hashes import BLOCK_TOKENS, hash_blocks
from baton.pages.kv_event_log import BATCH_MAX, KvEventLog
from baton.pages.prefix_tree import PrefixTree

ROOT = -1
PROMPT = tuple(range(10 * BLOCK_TOKENS))


class LoggedTree:
    """A prefix tree of one KV group with its log, and the prompts that were entered."""

    def __init__(self, block_tokens: int, events_max: int = 1_000) -> None:
        self.tree = PrefixTree((block_tokens,))
        self.log = KvEventLog(block_tokens, events_max)
        self.tree.listener = self.log
        self.entered: dict[tuple[tuple[int, ...], int], None] = {}
        self._pages = count()

    def enter(self, prompt: tuple[int, ...], salt: int = 0) -> None:
        """Enter the whole blocks of a prompt, by a room that has ended."""
        pinned = self.tree.match(prompt, salt)
        self.tree.pin(pinned)
        whole = len(prompt) // self.tree.block_tokens
        own = (PageId(next(self._pages)) for _ in range(whole - len(pinned)))
        entered = self.tree.enter(prompt, ((*pinned, *own),), len(pinned), salt)
        self.tree.unpin(entered.way)
        self.entered[prompt, salt] = None

    def found(self) -> set[bytes]:
        """Return the hash blocks that lookups find, by the tree alone."""
        found: set[bytes] = set()
        for prompt, salt in self.entered:
            tokens = len(self.tree.match(prompt, salt)) * self.tree.block_tokens
            found.update(hash_blocks(prompt[:tokens], salt))
        return found

    def logged(self) -> set[bytes]:
        return {block for part in self.log.snapshot() for block in part.blocks}


@pytest.mark.parametrize("block_tokens", [16, 48, 64, 96, 128, 256])
@pytest.mark.parametrize("seed", range(6))
def test_log_is_tree_whatever_is_entered_evicted_and_hidden(block_tokens: int, seed: int) -> None:
    """Whatever the size of a block is, the log has the hashes that lookups find, and so have its events."""
    rng = random.Random(seed)
    logged, replayed = LoggedTree(block_tokens), set[bytes]()
    shared = [tuple(rng.randrange(9) for _ in range(rng.randrange(600))) for _ in range(3)]
    for _ in range(60):
        before = logged.log.number
        act = rng.random()
        if act < 0.6:
            begin = rng.choice(shared)
            end = tuple(rng.randrange(3) for _ in range(rng.randrange(0, 400)))
            logged.enter((*begin[: rng.randrange(len(begin) + 1)], *end), rng.choice((0, 0, 7)))
        elif act < 0.9:
            logged.tree.evict(rng.randrange(logged.tree.evictable + 1))
        elif logged.entered:
            prompt, salt = rng.choice(list(logged.entered))
            way = logged.tree.match(prompt, salt)
            if way:
                logged.tree.distrust(rng.choice(way))
        assert logged.logged() == logged.found()
        events = logged.log.after(before)
        assert events is not None
        for event in events.events:
            assert (event.block in replayed) is not event.is_stored, "each event is a change"
            replayed ^= {event.block}
        assert replayed == logged.found()
    logged.tree.evict(logged.tree.evictable)
    assert not len(logged.log)
    assert logged.log.digest == 0


def test_log_is_tree_blocks_below_a_hidden_one_are_not_logged() -> None:
    """A room that uses a hidden block goes on, and enters what it computed below it."""
    logged = LoggedTree(BLOCK_TOKENS)
    logged.enter(PROMPT[: 2 * BLOCK_TOKENS])
    way = logged.tree.pin(logged.tree.match(PROMPT))
    logged.tree.distrust(way[0])
    assert logged.logged() == set()
    logged.tree.enter(PROMPT, ((*way, *map(PageId, range(50, 58))),), len(way))
    assert logged.tree.match(PROMPT) == ()
    assert logged.logged() == set()


def test_events_are_numbered_without_a_gap_and_the_digest_is_that_after_the_last() -> None:
    logged = LoggedTree(BLOCK_TOKENS)
    logged.enter(PROMPT)
    first, rest = logged.log.after(0), logged.log.after(4)
    assert first is not None
    assert rest is not None
    assert (first.first, first.last, rest.first, rest.last) == (1, 10, 5, 10)
    assert [each.block for each in first.events] == list(hash_blocks(PROMPT))
    assert first.events[4:] == rest.events
    assert first.digest == rest.digest == logged.log.digest
    idle = logged.log.after(10)
    assert idle is not None
    assert (idle.first, idle.events, idle.digest) == (11, (), logged.log.digest)


def test_what_is_forgotten_or_of_another_log_takes_a_snapshot() -> None:
    logged = LoggedTree(BLOCK_TOKENS, events_max=4)
    logged.enter(PROMPT)
    assert logged.log.after(5) is None
    assert logged.log.after(11) is None, "it is not of this log"
    events = logged.log.after(6)
    assert events is not None
    assert len(events.events) == 4
    [part] = logged.log.snapshot()
    assert (part.number, part.part, part.parts, part.digest) == (10, 0, 1, logged.log.digest)
    assert set(part.blocks) == set(hash_blocks(PROMPT))


def test_batches_and_parts_are_bounded_and_each_batch_has_its_own_digest() -> None:
    log = KvEventLog(BLOCK_TOKENS)
    for number in range(BATCH_MAX + 1):
        log.stored(ROOT, PageId(number), [number] * BLOCK_TOKENS, 0)
    batch = log.after(0)
    assert batch is not None
    assert len(batch.events) == BATCH_MAX
    last = log.after(batch.last)
    assert last is not None
    assert batch.digest ^ int.from_bytes(last.events[0].block, "big") == log.digest == last.digest
    assert [len(part.blocks) for part in log.snapshot()] == [BATCH_MAX, 1]


def test_readers_are_woken_by_each_event_and_not_after_they_left() -> None:
    woken: list[int] = []
    logged = LoggedTree(BLOCK_TOKENS)

    def wake() -> None:
        woken.append(logged.log.number)

    logged.log.on_event.add(wake)
    logged.enter(PROMPT[: 2 * BLOCK_TOKENS])
    logged.log.on_event.discard(wake)
    logged.enter(PROMPT)
    assert woken == [1, 2]
