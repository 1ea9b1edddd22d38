"""Tests of the transfer of one room: the order of pages, record and seal, and when no write is left under
way."""

from collections.abc import Sequence

import pytest

from baton.handover.route import Route, Target
from baton.ids import Generation, Incarnation, RoomId
from baton.pages.record import SLOT_BYTES, MetadataRecord
from baton.pages.transfer_plan import PageRun, TransferPlan, plan_hand_over
from baton.prefill.room_transfer import WINDOWS_IN_FLIGHT_MAX, Quota, RoomTransfer, TransferStage
from baton.rooms.evidence import Granted
from baton.runtime.host_memory import HostMemory
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.memory_transfer import MemoryTransfer
from baton.testing.transfer_faults import NO_FAULTS, FaultPlan
from baton.transfer.transfer_protocol import PutId, Region, Run, kv_region
from tests.pages.ids import page_ids
from tests.prefill import toy
from tests.prefill.bench import DECODE, PAGES, PLACES, PREFILL, Receiver

PAGE = toy.GROUP.page_bytes
TOKENS = 16
RECORD = MetadataRecord(RoomId(9), Generation(5), TOKENS, cached_tokens=0, pages=(4,), first_token=3)


class Watched(MemoryTransfer):
    """A transfer that records each put and how many were under way by then."""

    def __init__(self, fabric: MemoryFabric, incarnation: Incarnation) -> None:
        super().__init__(fabric, incarnation)
        self.posted: list[tuple[str, int, int]] = []

    def put(self, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        self.posted.append((region, sum(length for _, _, length in runs), self.pending(peer)))
        return super().put(peer, region, runs)


class Bench:
    def __init__(self, plan: FaultPlan, grant: Granted, source: Sequence[int], window_bytes: int) -> None:
        self.fabric = MemoryFabric(plan)
        self.receiver = Receiver(self.fabric)
        self.kv = HostMemory(PAGES * PAGE)
        self.slots = HostMemory(PLACES * SLOT_BYTES)
        for page in range(PAGES):
            self.kv.view[page * PAGE : (page + 1) * PAGE] = bytes([page + 1]) * PAGE
        self.transfer = Watched(self.fabric, PREFILL)
        self.transfer.register(Region(kv_region(0), self.kv.address, self.kv.length))
        self.transfer.register(Region("slots", self.slots.address, self.slots.length))
        self.transfer.connect(self.receiver.endpoint)
        self.counted: list[int] = []
        pages = plan_hand_over([toy.LAYOUT], [toy.LAYOUT]).between(0, 0)
        self.push = RoomTransfer(
            self.transfer,
            Route(DECODE, (toy.PAGE_TOKENS,), (Target(DECODE, pages, toy.LAYOUT.heads),)),
            (page_ids(*source),),
            toy.PAGE_TOKENS,
            grant,
            window_bytes,
            self.slots.view[SLOT_BYTES : 2 * SLOT_BYTES],
            1,
        )

    def advance(self, most: int = 500) -> None:
        for _ in range(most):
            self.push.advance(self.counted.append)
            if self.push.stage is TransferStage.SEALED or self.push.failure is not None:
                return

    def write(self, most: int = 500) -> None:
        """Advance the push until all its pages are written."""
        for _ in range(most):
            if self.push.written:
                return
            self.push.advance(self.counted.append)
        raise AssertionError("the pages were not written")

    def complete(self) -> None:
        """Report all of the room as computed, and add its record."""
        self.push.ready(TOKENS, complete=True)
        self.push.add_record(RECORD, lambda _: 0)

    def record(self) -> MetadataRecord | None:
        return self.receiver.record(2, 9, 5)


GRANT = Granted(Generation(5), (page_ids(7, 3, 4, 5),), 2)
SOURCE = (1, 2, 3, 8)


def bench(plan: FaultPlan = NO_FAULTS, window_bytes: int = PAGE) -> Bench:
    return Bench(plan, GRANT, SOURCE, window_bytes)


@pytest.mark.parametrize("seed", range(20))
def test_every_page_and_the_record_are_there_before_the_seal(seed: int) -> None:
    at = bench(FaultPlan(seed, delay_steps_max=9, hold_share=0.3, hold_steps=20))
    at.complete()
    at.write()
    assert [at.receiver.page(page) for page in GRANT.pages[0]] == [
        bytes([page + 1]) * PAGE for page in SOURCE
    ]
    assert any(at.receiver.slots.view[2 * SLOT_BYTES :][:4]), "it knows that the seal is near"
    at.push.advance(at.counted.append)
    assert at.record() is None, "other ranks may be writing yet"
    at.push.seal()
    for _ in range(500):
        at.push.advance(at.counted.append)
        if at.record() is not None:
            break
        assert at.push.stage is not TransferStage.SEALED
    assert at.record() == RECORD
    at.advance()
    assert at.push.stage is TransferStage.SEALED
    assert sum(at.counted) == 4 * PAGE
    regions = [region for region, _, _ in at.transfer.posted]
    assert regions == ["slots", *[kv_region(0)] * 4, "slots"]
    assert [pending for region, _, pending in at.transfer.posted if region == "slots"] == [0, 0]


def test_no_more_windows_are_under_way_than_may_and_none_is_larger() -> None:
    at = bench(FaultPlan(delay_steps_max=30), window_bytes=PAGE // 2)
    at.push.ready(TOKENS, complete=True)
    for _ in range(400):
        at.push.advance(at.counted.append)
    assert [length for _, length, _ in at.transfer.posted] == [PAGE // 2] * 8
    assert max(pending for _, _, pending in at.transfer.posted) == WINDOWS_IN_FLIGHT_MAX - 1
    assert at.push.stage is TransferStage.PAGES, "nobody said that every rank has written"
    assert at.push.written


def test_what_a_window_carries_is_found_when_it_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is ready at once, as where a long prompt was cached."""
    planned: list[tuple[int, int]] = []
    runs = TransferPlan.runs

    def noted(
        plan: TransferPlan,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        first: int,
        start: int,
        stop: int,
        *,
        ends: bool,
    ) -> list[list[PageRun]]:
        planned.append((start, stop))
        return runs(plan, sources, targets, first, start, stop, ends=ends)

    monkeypatch.setattr(TransferPlan, "runs", noted)
    at = bench(FaultPlan(hold_share=1.0, hold_steps=30))
    at.push.ready(TOKENS, complete=True)
    assert planned == []
    at.push.advance(at.counted.append)
    assert planned == [(0, 4), (4, 8)], "as many windows as may be under way"
    assert at.push.under_way
    assert not at.push.written
    at.write()
    assert planned == [(0, 4), (4, 8), (8, 12), (12, 16)]


def test_no_more_leaves_in_a_turn_than_all_rooms_together_may_send() -> None:
    at, quota = bench(), Quota(2)
    at.push.ready(TOKENS, complete=True)
    assert at.push.advance(at.counted.append, quota)
    assert quota.windows == 0
    assert not at.push.written
    assert [region for region, _, _ in at.transfer.posted] == [kv_region(0)] * 2
    while at.transfer.pending(DECODE):
        at.push.advance(at.counted.append, quota)
    assert len(at.transfer.posted) == 2
    assert at.push.under_way, "what waits for its turn does, too"
    at.write()
    at.complete()
    for _ in range(50):
        at.push.advance(at.counted.append, quota)
    at.push.seal()
    for _ in range(50):
        at.push.advance(at.counted.append, quota)
    assert at.push.stage is TransferStage.SEALED, "records and seals cost next to nothing"


def test_neighbouring_pages_leave_as_one_run_and_nothing_leaves_before_it_is_ready() -> None:
    at = bench(window_bytes=8 * PAGE)
    at.push.ready(toy.PAGE_TOKENS)
    at.advance(20)
    assert [length for _, length, _ in at.transfer.posted] == [PAGE]
    at.push.ready(TOKENS, complete=True)
    at.write()
    assert [length for _, length, _ in at.transfer.posted] == [PAGE, 3 * PAGE]


def test_a_page_that_is_partly_computed_stays_and_leaves_as_it_is_with_the_last_chunk() -> None:
    at = bench(window_bytes=8 * PAGE)
    for tokens in range(1, toy.PAGE_TOKENS):
        at.push.ready(tokens)
        at.advance(5)
        assert at.transfer.posted == []
    at.push.ready(2 * toy.PAGE_TOKENS + 1)
    at.advance(5)
    at.push.ready(2 * toy.PAGE_TOKENS + 2, complete=True)
    at.write()
    assert [length for _, length, _ in at.transfer.posted] == [2 * PAGE, PAGE]
    assert at.receiver.page(GRANT.pages[0][2]) == bytes([SOURCE[2] + 1]) * PAGE


def test_pages_are_written_when_all_were_ready_and_not_when_all_that_were_ready_are() -> None:
    at = bench()
    at.push.ready(TOKENS)
    at.advance(50)
    assert len(at.counted) == 4
    assert not at.push.written, "more may come"
    at.push.ready(TOKENS, complete=True)
    assert at.push.written


def test_a_failed_write_fails_the_push_and_it_is_quiet_only_when_the_others_have_ended() -> None:
    at = bench(FaultPlan(seed=1, fail_share=1.0, delay_steps_max=5))
    at.push.ready(TOKENS, complete=True)
    at.advance()
    assert at.push.failure == "a write ended without reaching the decode worker"
    assert not at.push.written
    while not at.push.drain(at.counted.append):
        assert at.transfer.pending(DECODE) > 0
    assert at.transfer.pending(DECODE) == 0
    assert not at.push.written
    assert at.record() is None


def test_a_drained_push_posts_nothing_more_and_waits_for_what_it_posted() -> None:
    at = bench(FaultPlan(hold_share=1.0, hold_steps=50))
    at.push.ready(TOKENS, complete=True)
    at.push.advance(at.counted.append)
    assert at.push.under_way
    laps = 0
    while not at.push.drain(at.counted.append):
        laps += 1
        assert laps < 500
    assert laps > 10, "the write was held"
    assert not at.push.advance(at.counted.append)
    assert len(at.transfer.posted) == WINDOWS_IN_FLIGHT_MAX < TOKENS // toy.PAGE_TOKENS
    assert not at.push.under_way


def test_a_destination_outside_the_peers_memory_fails_the_push() -> None:
    at = Bench(FaultPlan(), Granted(Generation(5), (page_ids(PAGES),), 0), (1,), PAGE)
    at.push.ready(toy.PAGE_TOKENS)
    at.advance()
    assert at.push.failure is not None
    assert "does not lie in region 'kv0'" in at.push.failure


def test_behind_a_record_that_cannot_be_sent_no_page_leaves() -> None:
    at = Bench(NO_FAULTS, Granted(Generation(5), GRANT.pages, PLACES), SOURCE, PAGE)
    at.complete()
    at.advance()
    assert at.push.failure is not None
    assert "does not lie in region 'slots'" in at.push.failure
    assert [region for region, _, _ in at.transfer.posted] == ["slots"]


def test_a_room_with_no_page_to_send_still_gets_its_record() -> None:
    at = Bench(FaultPlan(), Granted(Generation(5), (), 2, prefix_tokens=TOKENS), SOURCE, PAGE)
    at.complete()
    assert not at.push.written, "its record is not"
    at.write()
    at.push.seal()
    at.advance()
    assert at.record() == RECORD
    assert [region for region, _, _ in at.transfer.posted] == ["slots", "slots"]
