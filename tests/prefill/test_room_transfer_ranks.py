"""Tests of the transfer of a room from several ranks of one worker into several ranks of another."""

from collections.abc import Callable, Sequence

import pytest

from baton.ids import Generation, Incarnation, RoomId
from baton.pages.layout import GroupHead
from baton.pages.record import SLOT_BYTES, MetadataRecord
from baton.prefill.room_transfer import WINDOWS_IN_FLIGHT_MAX, RoomTransfer, TransferStage
from baton.rooms.evidence import Granted
from baton.testing.memory_fabric import MemoryFabric
from baton.testing.transfer_faults import NO_FAULTS, FaultPlan
from baton.topology import Topology
from baton.transfer.transfer_protocol import PutId, Run, kv_region
from tests.pages.ids import page_ids
from tests.prefill.ranks import RECEIVER, RECEIVER_RANKS, RankMemory, Ranks

ROOM, GENERATION, SLOT = RoomId(9), Generation(5), 2
PAIRS = {
    "tp 2 to tp 2": (Topology(2), Topology(2)),
    "pp 2 to 1": (Topology(pipeline=2), Topology()),
    "pp 2 to tp 2": (Topology(pipeline=2), Topology(2)),
    "1 to tp 2": (Topology(), Topology(2)),
    "tp 2 to 1": (Topology(2), Topology()),
    "replicated heads 4 to 1": (Topology(4), Topology()),
    "1 to replicated heads 4": (Topology(), Topology(4)),
    "tp 2 and pp 3 to tp 4": (Topology(2, 3), Topology(4)),
}


class Room:
    """One room on every rank."""

    def __init__(
        self,
        senders: Topology,
        receivers: Topology,
        *,
        tokens: int = 14,
        prefix: int = 0,
        page_tokens: tuple[int, int] = (4, 4),
        plan: FaultPlan = NO_FAULTS,
        window_bytes: int = 48,
    ) -> None:
        self.tokens, self.prefix = tokens, prefix
        self.at = Ranks(MemoryFabric(plan), senders, receivers, page_tokens)
        self.at.connect()
        pages = -(-(tokens - prefix) // page_tokens[1])
        self.grant = Granted(Generation(GENERATION), (page_ids(*range(pages, 0, -1)),), SLOT, prefix)
        self.pushes = [self._push(rank, page_tokens[0], window_bytes) for rank in range(senders.ranks)]

    def _push(self, rank: int, page_tokens: int, window_bytes: int) -> RoomTransfer:
        transfer = self.at.senders[rank]
        source = [11 - rank - page for page in range(-(-self.tokens // page_tokens))]
        transfer.fill(source, self.tokens)
        way = self.at.routes[rank].granted(RECEIVER, RECEIVER_RANKS)
        staging = transfer.slots.view[:SLOT_BYTES]
        return RoomTransfer(
            transfer, way, (page_ids(*source),), page_tokens, self.grant, window_bytes, staging, 0
        )

    def write(self, *chunks: int, checksum: Callable[[Sequence[GroupHead]], int] = lambda _: 0) -> None:
        """Compute so far on every rank, and in the end all of it; until every rank has written."""
        for stop in (*chunks, self.tokens):
            for push in self.pushes:
                if stop < self.tokens:
                    push.ready(stop)
                else:
                    self.complete(push, checksum)
                self.advance()
        for _ in range(2_000):
            if all(push.written for push in self.pushes):
                return
            self.advance()
        raise AssertionError("the pages were not written")

    def complete(
        self, push: RoomTransfer, checksum: Callable[[Sequence[GroupHead]], int] = lambda _: 0
    ) -> None:
        """Report all of the room as computed on this rank. The first rank adds the record."""
        push.ready(self.tokens, complete=True)
        if push is self.pushes[0]:
            pages = tuple(map(len, self.grant.pages))
            push.add_record(MetadataRecord(ROOM, GENERATION, self.tokens, 0, pages, first_token=3), checksum)

    def advance(self, laps: int = 1) -> None:
        for _ in range(laps):
            for push in self.pushes:
                push.advance(lambda _: None)

    def seal(self) -> None:
        self.pushes[0].seal()
        for _ in range(500):
            self.advance()
            if self.pushes[0].stage is TransferStage.SEALED:
                return
        raise AssertionError("never sealed")

    def landed(self) -> list[bool]:
        return [
            each.holds(self.grant.pages[0], self.prefix, self.prefix, self.tokens)
            for each in self.at.receivers
        ]

    def records(self) -> list[MetadataRecord | None]:
        return [each.record(SLOT, ROOM, GENERATION) for each in self.at.receivers]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("prefix", "chunks"), [(0, ()), (8, (3, 9)), (0, (5,))])
def test_layers_by_id_every_rank_of_the_receiver_gets_its_layers_and_heads(
    pair: str, prefix: int, chunks: tuple[int, ...]
) -> None:
    room = Room(*PAIRS[pair], prefix=prefix, plan=FaultPlan(delay_steps_max=5))
    room.write(*chunks)
    assert all(room.landed())
    room.seal()
    assert all(record is not None for record in room.records())


@pytest.mark.parametrize("page_tokens", [(2, 4), (4, 2), (8, 4), (4, 8), (2, 8), (8, 2)], ids=str)
@pytest.mark.parametrize("prefix", [0, 8])
@pytest.mark.parametrize("tokens", [13, 14, 16])
def test_pages_of_another_size_are_filled_just_so(
    page_tokens: tuple[int, int], prefix: int, tokens: int
) -> None:
    room = Room(Topology(2), Topology(pipeline=2), tokens=tokens, prefix=prefix, page_tokens=page_tokens)
    room.write(3, 9, 11)
    assert all(room.landed())


@pytest.mark.parametrize("page_tokens", [(2, 4), (8, 4), (4, 4)], ids=str)
def test_a_window_has_a_bounded_number_of_runs_however_short_they_are(
    page_tokens: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    put = RankMemory.put

    def noted(transfer: RankMemory, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        counts.append(len(runs))
        return put(transfer, peer, region, runs)

    monkeypatch.setattr(RankMemory, "put", noted)
    monkeypatch.setattr("baton.prefill.room_transfer.RUNS_MAX", 13)
    room = Room(Topology(), Topology(2), tokens=22, page_tokens=page_tokens, window_bytes=1 << 20)
    room.write()
    assert all(room.landed())
    assert max(counts) <= 13


def test_every_target_gets_its_part_of_what_is_planned_together() -> None:
    """The parts leave one after the other. Pages that become ready meanwhile come behind them."""
    room = Room(Topology(), Topology(4), plan=FaultPlan(delay_steps_max=9), window_bytes=96)
    push = room.pushes[0]
    for stop in (4, 8, 12):
        push.ready(stop)
        push.advance(lambda _: None)
    room.write()
    assert all(room.landed())


def test_one_writer_the_elected_rank_writes_record_and_seal_to_every_rank_of_the_receiver() -> None:
    """It does so for ranks that it has no page for, too. The other ranks write pages alone."""
    room = Room(Topology(2), Topology(2))
    room.write()
    room.seal()
    first, second = room.at.senders
    to = [RECEIVER_RANKS, RECEIVER_RANKS + 1]
    assert [peer for peer, region, _ in first.posted if region == "slots"] == [*to, *to]
    assert {peer for peer, region, _ in first.posted if region == kv_region(0)} == {RECEIVER_RANKS}
    assert {(peer, region) for peer, region, _ in second.posted} == {(RECEIVER_RANKS + 1, kv_region(0))}


@pytest.mark.parametrize("seed", range(10))
def test_seal_last_no_rank_is_sealed_before_every_rank_has_its_record(seed: int) -> None:
    plan = FaultPlan(seed, delay_steps_max=9, hold_share=0.4, hold_steps=60)
    room = Room(Topology(pipeline=2), Topology(4), plan=plan)
    room.write()
    assert room.records() == [None] * 4
    room.pushes[0].seal()
    slots = [each.slots.view[SLOT * SLOT_BYTES :] for each in room.at.receivers]
    while room.pushes[0].stage is not TransferStage.SEALED:
        room.advance()
        if any(record is not None for record in room.records()):
            assert all(any(slot[:32]) for slot in slots), "a record is missing"
    assert all(record is not None for record in room.records())
    seals = [under_way for _, region, under_way in room.at.senders[0].posted if region == "slots"][4:]
    assert seals == [0, 1, 2, 3], "nothing was under way when the first seal was posted"


def test_a_write_that_is_under_way_to_any_rank_of_the_receiver_is_waited_for() -> None:
    """The push waits for writes to all ranks, not only to the first one that it writes to."""
    room = Room(Topology(), Topology(2))
    push = room.pushes[0]
    room.at.fabric.stall(room.at.receivers[1].known.incarnation)
    push.ready(room.tokens, complete=True)
    room.advance(200)
    assert not push.written
    assert not push.drain(lambda _: None)
    room.at.fabric.resume(room.at.receivers[1].known.incarnation)
    room.advance(5)
    assert push.drain(lambda _: None)


def test_ranks_of_the_receiver_that_hold_other_heads_are_told_other_sums() -> None:
    """Each rank gets the checksum of its own heads. The slot that records are written from is reused only
    after its last write is DONE."""
    room = Room(Topology(), Topology(4), plan=FaultPlan(hold_share=1.0, hold_steps=30))
    room.write(checksum=lambda heads: 1_000 + heads[0][1])
    room.seal()
    assert [record and record.pages_checksum for record in room.records()] == [1_001, 1_001, 1_002, 1_002]


def test_no_more_windows_are_under_way_than_may_to_all_ranks_together() -> None:
    room = Room(Topology(), Topology(4), plan=FaultPlan(delay_steps_max=30))
    room.pushes[0].ready(room.tokens, complete=True)
    room.advance(400)
    assert room.pushes[0].written
    assert max(under_way for _, _, under_way in room.at.senders[0].posted) == WINDOWS_IN_FLIGHT_MAX - 1


def test_a_rank_with_nothing_to_send_has_written_when_it_has_computed() -> None:
    room = Room(Topology(4), Topology(), tokens=5)
    for push in room.pushes:
        push.ready(4)
    assert not any(push.written for push in room.pushes)
    for push in room.pushes:
        push.ready(5, complete=True)
    idle = [rank for rank, push in enumerate(room.pushes) if push.written]
    assert idle == [1, 3], "two ranks hold each head, and one of them sends it"
    assert all(room.pushes[rank].drain(lambda _: None) for rank in idle)


def test_a_write_that_fails_to_one_rank_of_the_receiver_fails_the_push_for_all() -> None:
    room = Room(Topology(), Topology(2))
    room.at.fabric.kill(room.at.receivers[1].known.incarnation)
    push = room.pushes[0]
    push.ready(room.tokens, complete=True)
    room.advance(50)
    assert push.failure is not None
    assert not push.written


def test_a_drained_push_tells_no_rank_anything_more() -> None:
    room = Room(Topology(), Topology(4), plan=FaultPlan(hold_share=1.0, hold_steps=40))
    room.complete(room.pushes[0], lambda heads: heads[0][1])
    room.advance()
    posted = len(room.at.senders[0].posted)
    while not room.pushes[0].drain(lambda _: None):
        room.at.fabric.step()
    assert len(room.at.senders[0].posted) == posted
    assert room.records() == [None] * 4
    assert room.at.fabric.puts_under_way == 0
