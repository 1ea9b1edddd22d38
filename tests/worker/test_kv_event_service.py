"""Tests of the stream of a worker's KV event log, from the prefix tree to the router's registry."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import grpc
import pytest

from baton.bootstrap import kv_event_streams
from baton.bootstrap.kv_event_streams import KvEventStreams
from baton.fleet.registry import Registry
from baton.ids import Incarnation, PageId
from baton.pages.block_hashes import BLOCK_TOKENS, Block, hash_blocks
from baton.pages.kv_event_log import KvEventLog
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WorkerFacts
from baton.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from baton.wire.channel import Channels
from baton.wire.errors import remote_error
from baton.wire.load_messages import kv_log_from_wire, kv_log_to_wire
from baton.wire.malformed import Malformed
from baton.worker import kv_event_service
from baton.worker.kv_event_service import READERS_MAX, KvEventService
from tests.fleet.test_registry import facts as facts_of
from tests.fleet.test_registry import registry_of
from tests.ports import free_port
from tests.wire.servers import channel_to, serving, until

ROOT = -1
PROMPT = tuple(range(8 * BLOCK_TOKENS))


class Worker:
    """A worker with a prefix cache in blocks of one hash block, and the log of it."""

    def __init__(self) -> None:
        self.port = free_port()
        self._pages = count()
        self.facts = replace(
            facts_of(Side.PREFILL, 1, tokens_max=100 * BLOCK_TOKENS), address=f"127.0.0.1:{self.port}"
        )
        self.log = KvEventLog(BLOCK_TOKENS, events_max=16)

    def cache(self, prompt: tuple[int, ...]) -> list[PageId]:
        """Cache a prompt of which nothing is cached."""
        pages: list[PageId] = []
        for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            page = PageId(next(self._pages))
            self.log.stored(pages[-1] if pages else ROOT, page, prompt, start)
            pages.append(page)
        return pages

    def cached(self) -> set[Block]:
        return {block for part in self.log.snapshot() for block in part.blocks}

    @asynccontextmanager
    async def serving(self, incarnation: Incarnation | None = None) -> AsyncIterator[None]:
        service = KvEventService(incarnation or self.facts.incarnation, self.log)

        def add(server: grpc.aio.Server) -> None:
            workers_pb2_grpc.add_KvEventServiceServicer_to_server(service, server)

        async with serving(add, self.port):
            yield


class Router:
    """A router's registry that reads the logs of its workers."""

    def __init__(self) -> None:
        self.registry: Registry = registry_of()
        self.channels = Channels()
        self.streams = KvEventStreams(self.channels, self.registry)

    def follow(self, facts: WorkerFacts) -> None:
        self.registry.register(facts, 0)
        self.streams.follow(facts)

    def has_all(self, worker: Worker) -> bool:
        kv_log = self.registry.worker(worker.facts.incarnation).kv_log
        return kv_log.is_current and kv_log.number == worker.log.number and kv_log.blocks == worker.cached()

    async def close(self) -> None:
        await self.streams.close()
        await self.channels.close()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(kv_event_streams, "PAUSE_S", 0.01)
    monkeypatch.setattr(kv_event_streams, "PAUSE_S_MAX", 0.02)
    monkeypatch.setattr(kv_event_service, "GATHER_S", 0.001)
    return Worker()


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    made = Router()
    yield made
    await made.close()


async def test_log_is_tree_each_router_has_what_is_cached_and_each_change(
    worker: Worker, router: Router
) -> None:
    pages = worker.cache(PROMPT)
    other = Router()
    async with worker.serving():
        for each in (router, other):
            each.follow(worker.facts)
            await until(lambda each=each: each.has_all(worker))  # type: ignore[misc]
        for page in reversed(pages[3:]):
            worker.log.hidden(page)
        worker.cache(tuple(range(1, 5 * BLOCK_TOKENS)))
        await until(lambda: router.has_all(worker) and other.has_all(worker))
        known = router.registry.worker(worker.facts.incarnation)
        assert known.cached_tokens(hash_blocks(PROMPT)) == 3 * BLOCK_TOKENS
        await other.close()
        await until(lambda: len(worker.log.on_event) == 1)
    assert len(other.streams) == 0


async def test_log_is_tree_a_broken_stream_goes_on_or_begins_with_a_snapshot(
    worker: Worker, router: Router
) -> None:
    worker.cache(PROMPT)
    async with worker.serving():
        router.follow(worker.facts)
        await until(lambda: router.has_all(worker))
    worker.cache(tuple(range(7, 7 + 2 * BLOCK_TOKENS)))  # as many events as are remembered
    async with worker.serving():
        await until(lambda: router.has_all(worker))
    for number in range(20):  # more than are remembered
        worker.cache(tuple(range(number * 100, number * 100 + BLOCK_TOKENS)))
    assert not router.has_all(worker)
    async with worker.serving():
        await until(lambda: router.has_all(worker))


async def test_log_is_tree_a_reader_that_differs_reads_anew(worker: Worker, router: Router) -> None:
    worker.cache(PROMPT)
    async with worker.serving():
        router.follow(worker.facts)
        await until(lambda: router.has_all(worker))
        kv_log = router.registry.worker(worker.facts.incarnation).kv_log
        kv_log.number += 1  # as if an event had been applied that the log does not have
        worker.cache(tuple(range(5, 5 + 3 * BLOCK_TOKENS)))
        await until(lambda: router.has_all(worker))


async def test_incarnation_another_process_at_the_address_is_not_read(worker: Worker, router: Router) -> None:
    worker.cache(PROMPT)
    async with worker.serving(Incarnation(99)):
        request = workers_pb2.WatchKvEventsRequest(incarnation=worker.facts.incarnation)
        async with channel_to(worker.facts.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(workers_pb2_grpc.KvEventServiceStub(channel).WatchKvEvents(request)))
        assert remote_error(caught.value).kind == "WrongIncarnation"
        router.follow(worker.facts)
        await asyncio.sleep(0.05)
        assert not router.registry.worker(worker.facts.incarnation).kv_log.is_current


async def test_a_worker_without_the_service_is_left_alone(worker: Worker, router: Router) -> None:
    def nothing(server: grpc.aio.Server) -> None:
        """Add no service."""

    async with serving(nothing, worker.port):
        router.follow(worker.facts)
        [task] = router.streams._tasks.values()
        async with asyncio.timeout(20):
            await task


async def test_a_worker_that_is_gone_is_read_no_more(worker: Worker, router: Router) -> None:
    async with worker.serving():
        router.follow(worker.facts)
        await until(lambda: router.has_all(worker))
        router.registry.leave(worker.facts.incarnation, "left", 0)
        router.streams.drop(worker.facts.incarnation)
        await until(lambda: not worker.log.on_event)
        assert len(router.streams) == 0


async def test_bounded_readers(worker: Worker) -> None:
    request = workers_pb2.WatchKvEventsRequest(incarnation=worker.facts.incarnation)
    async with worker.serving(), channel_to(worker.facts.address) as channel:
        stub = workers_pb2_grpc.KvEventServiceStub(channel)
        calls = [stub.WatchKvEvents(request) for _ in range(READERS_MAX)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.WatchKvEvents(request)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        await until(lambda: not worker.log.on_event)


def logged() -> KvEventLog:
    log = KvEventLog(BLOCK_TOKENS)
    log.stored(ROOT, PageId(0), PROMPT, 0)
    log.hidden(PageId(0))
    log.stored(ROOT, PageId(1), PROMPT, 0)
    return log


def test_a_logs_messages_cross_the_wire() -> None:
    log = logged()
    events = log.after(0)
    assert events is not None
    assert kv_log_from_wire(kv_log_to_wire(events)) == events
    [part] = log.snapshot()
    assert kv_log_from_wire(kv_log_to_wire(part)) == part


@pytest.mark.parametrize(
    "changes", [{"hashes": b"x" * 47}, {"is_stored": [True]}, {"first": 0}, {"digest": b"x"}], ids=str
)
def test_malformed_is_contained_wrong_events_are_refused(changes: dict[str, Any]) -> None:
    events = logged().after(0)
    assert events is not None
    wire = kv_log_to_wire(events).events
    fields = {name: getattr(wire, name) for name in ("first", "hashes", "is_stored", "digest")}
    with pytest.raises(Malformed):
        kv_log_from_wire(workers_pb2.KvLogMessage(events=workers_pb2.KvEvents(**fields | changes)))


@pytest.mark.parametrize(
    "changes",
    [{"part": 1}, {"parts": 0}, {"parts": 5_000}, {"hashes": b"x" * 16 * 4_097}, {"digest": b""}],
    ids=lambda changes: "-".join(changes),
)
def test_malformed_is_contained_wrong_parts_of_snapshots_are_refused(changes: dict[str, Any]) -> None:
    [part] = logged().snapshot()
    wire = kv_log_to_wire(part).snapshot
    fields = {name: getattr(wire, name) for name in ("number", "part", "parts", "hashes", "digest")}
    with pytest.raises(Malformed):
        kv_log_from_wire(workers_pb2.KvLogMessage(snapshot=workers_pb2.KvSnapshotPart(**fields | changes)))


def test_malformed_is_contained_an_empty_message_is_refused() -> None:
    with pytest.raises(Malformed):
        kv_log_from_wire(workers_pb2.KvLogMessage())
