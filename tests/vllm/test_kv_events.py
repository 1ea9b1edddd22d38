"""Tests that KV events are read by vLLM's own types, live and replayed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from baton.ids import PageId
from baton.pages.kv_event_log import KvEventLog
from baton.pages.prefix_tree import PrefixTree
from baton.worker.kv_event_publisher import END_OF_REPLAY, KvEventPublisher, VllmKvEvents
from tests.patience import PATIENCE_S

BLOCK: Final = 4
TOPIC: Final = "kv@worker@model"
PROMPT: Final = tuple(range(100, 100 + 3 * BLOCK))


class Publishing:
    """A prefix tree whose changes are published, and sockets of a subscriber."""

    def __init__(self, folder: Path) -> None:
        import msgspec
        import zmq.asyncio
        from vllm.distributed import kv_events

        self.types = kv_events
        self.tree = PrefixTree((BLOCK,))
        log = KvEventLog(BLOCK)
        self.tree.listener = log
        log.further = events = VllmKvEvents(BLOCK)
        live, earlier = f"ipc://{folder}/live", f"ipc://{folder}/replay"
        context = zmq.asyncio.Context.instance()
        self.subscriber, self.replays = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.publisher = KvEventPublisher(events, live, earlier, TOPIC)
        self.subscriber.connect(live)
        self.subscriber.subscribe(TOPIC)
        self.replays.connect(earlier)
        self._decoder = msgspec.msgpack.Decoder(type=kv_events.KVEventBatch)

    def enter(self, prompt: tuple[int, ...], first_page: int, salt: int = 0) -> None:
        pinned = self.tree.match(prompt, salt)
        self.tree.pin(pinned)
        own = range(first_page, first_page + len(prompt) // BLOCK - len(pinned))
        entered = self.tree.enter(prompt, ((*pinned, *map(PageId, own)),), len(pinned), salt)
        self.tree.unpin(entered.way)

    async def read(self) -> tuple[int, list[Any]]:
        """Return the number of the next live batch, and its events."""
        async with asyncio.timeout(PATIENCE_S):
            topic, number, payload = await self.subscriber.recv_multipart()
        assert topic == TOPIC.encode()
        batch = self._decoder.decode(payload)
        assert batch.data_parallel_rank == 0
        return int.from_bytes(number, "big"), batch.events

    async def replay(self, start: int) -> list[tuple[int, list[Any]]]:
        await self.replays.send_multipart((b"", start.to_bytes(8, "big")))
        found: list[tuple[int, list[Any]]] = []
        while True:
            async with asyncio.timeout(PATIENCE_S):
                _, _, number, payload = await self.replays.recv_multipart()
            if number == END_OF_REPLAY:
                return found
            found.append((int.from_bytes(number, "big"), self._decoder.decode(payload).events))


@pytest.fixture
async def publishing(tmp_path: Path) -> AsyncIterator[Publishing]:
    made = Publishing(tmp_path)
    await asyncio.sleep(0.2)  # a subscription takes a moment, and what is published before is not seen
    running = asyncio.create_task(made.publisher.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    made.publisher.close()
    for each in (made.subscriber, made.replays):
        each.close(linger=0)


async def test_stored_and_removed_blocks_are_read_by_vllms_types(publishing: Publishing) -> None:
    assert await publishing.read() == (0, [publishing.types.AllBlocksCleared()])
    publishing.enter(PROMPT, 0)
    number, [stored] = await publishing.read()
    assert number == 1
    assert isinstance(stored, publishing.types.BlockStored)
    assert (stored.parent_block_hash, stored.block_size, stored.medium) == (None, BLOCK, "GPU")
    assert stored.token_ids == list(PROMPT)
    assert len(set(stored.block_hashes)) == 3
    publishing.enter((*PROMPT[: 2 * BLOCK], 7, 8, 9, 10), 10)
    _, [branch] = await publishing.read()
    assert branch.parent_block_hash == stored.block_hashes[1]
    assert branch.token_ids == [7, 8, 9, 10]
    publishing.tree.evict(1)
    _, [removed] = await publishing.read()
    assert isinstance(removed, publishing.types.BlockRemoved)
    assert removed.block_hashes == stored.block_hashes[2:]


async def test_earlier_batches_are_replayed_from_a_number_on(publishing: Publishing) -> None:
    batches = [await publishing.read()]
    for page in (0, 10, 20):
        publishing.enter(tuple(range(page, page + BLOCK)), page)
        batches.append(await publishing.read())
    assert await publishing.replay(0) == batches
    assert await publishing.replay(2) == batches[2:]
    assert await publishing.replay(4) == []


async def test_same_root_only_what_is_cached_under_a_salt_is_not_published(publishing: Publishing) -> None:
    await publishing.read()
    publishing.enter(PROMPT, 0, salt=5)
    publishing.enter(tuple(range(BLOCK)), 10)
    publishing.tree.evict(3)
    _, events = await publishing.read()
    assert [type(each) for each in events] == [publishing.types.BlockStored]
    assert events[0].token_ids == list(range(BLOCK))
