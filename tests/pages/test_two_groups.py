"""Tests of hand-overs of a model whose layers form two KV groups.

They run the pure core of both sides with the product's own plan and record, without turns. The groups differ
in layers, heads, head width and tokens per page."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import pytest

from baton.handover.handover_side import HandOverSide
from baton.handover.receiving_room import ReceivingRoom
from baton.handover.receiving_side import ReceivingSide
from baton.handover.requests import Grant, SendRecord
from baton.handover.route import Route, Target
from baton.handover.sending_room import SendingRoom
from baton.handover.sending_side import SendingSide
from baton.ids import Incarnation, RoomId
from baton.pages.errors import Truncated
from baton.pages.holdings import Holdings
from baton.pages.layout import KvGroup, KvKind, KvLayout, KvPlane
from baton.pages.pool import PagePool, PageState
from baton.pages.prefix_tree import PrefixTree
from baton.pages.record import SEAL_OFFSET, SLOT_BYTES, MetadataRecord, seal_bytes
from baton.pages.slots import SlotPool
from baton.pages.transfer_plan import plan_hand_over
from baton.rooms.evidence import Connected, Granted
from baton.rooms.phases import Phase, Vote
from baton.rooms.request import Request, Token
from baton.rooms.room import Room
from tests.rooms.group import deadlines

ROOM, RECEIVER, SENDER = RoomId(7), Incarnation(22), Incarnation(11)
FULL: Final = KvKind.FULL
OURS: Final = KvLayout(
    "model",
    (
        KvGroup(FULL, "float16", 2, (0, 2), (0, 1), (KvPlane("k", 2), KvPlane("v", 1))),
        KvGroup(FULL, "float16", 4, (1,), (0,), (KvPlane("k", 3), KvPlane("v", 3))),
    ),
)
"""The receiver's. The sender's pages have twice as many tokens."""
THEIRS: Final = KvLayout(
    "model", tuple(replace(each, page_tokens=2 * each.page_tokens) for each in OURS.groups)
)
PAGES: Final = 20
PROMPT: Final = tuple(range(11))

R = TypeVar("R", bound=Any)


class Memory:
    """One rank's memory, with a region for each group."""

    def __init__(self, layout: KvLayout) -> None:
        self.regions = [bytearray(PAGES * group.page_bytes) for group in layout.groups]
        self.slots = bytearray(2 * SLOT_BYTES)
        pools = [PagePool(PAGES) for _ in layout.groups]
        tree = PrefixTree(layout.page_tokens)
        self.holdings = Holdings(pools, SlotPool(memoryview(self.slots)), tree)


def turn(side: HandOverSide[R, Any], about: Room, wish: Vote = Vote.ADVANCE) -> list[Any]:
    """A turn of one rank, which wishes so much for one room. What it asks of the world."""
    votes = side.roster.votes(1, side.capacity())
    assert votes[about.index] is wish
    for room, effect in side.roster.settle(votes, 1):
        side.perform(room, effect, 1)
    return side.take_requests()


def asked(requests: Sequence[Any], kind: type[R]) -> R:
    (found,) = (each for each in requests if isinstance(each, kind))
    return found


@pytest.fixture
def ours() -> Memory:
    return Memory(OURS)


@pytest.fixture
def receiving(ours: Memory) -> ReceivingSide[ReceivingRoom]:
    return ReceivingSide(
        ReceivingRoom, 2, ours.holdings, OURS, deadlines(), exposure=RECEIVER, vocabulary=100
    )


@pytest.fixture
def theirs() -> Memory:
    return Memory(THEIRS)


@pytest.fixture
def sending(theirs: Memory) -> SendingSide[SendingRoom]:
    return SendingSide(SendingRoom, 2, theirs.holdings, THEIRS, deadlines(), elected=True)


def granted(
    receiving: ReceivingSide[ReceivingRoom],
    room: int,
    max_tokens: int = 6,
    further_seeds: tuple[int, ...] = (),
) -> tuple[ReceivingRoom, Grant]:
    request = Request(f"request-{room}", PROMPT, max_tokens, further_seeds=further_seeds)
    receiver = receiving.open(RoomId(room), request, SENDER, 0)
    receiver.note(Connected())
    turn(receiving, receiver)
    return receiver, asked(turn(receiving, receiver), Grant)


def hand_over(
    receiving: ReceivingSide[ReceivingRoom],
    sending: SendingSide[SendingRoom],
    ours: Memory,
    theirs: Memory,
    max_tokens: int = 6,
    further_seeds: tuple[int, ...] = (),
) -> tuple[Grant, MetadataRecord]:
    """Hand over one room from its opening to its admission. Returns the grant and the record."""
    receiver, grant = granted(receiving, ROOM, max_tokens, further_seeds)
    sender = sending.open(ROOM, receiver.request, RECEIVER, 0)
    between = plan_hand_over([THEIRS], [OURS]).between(0, 0)
    route = Route(RECEIVER, OURS.page_tokens, (Target(RECEIVER, between, OURS.heads),))
    evidence = Granted(grant.generation, grant.pages, grant.slot, grant.prefix_tokens)
    sending.grant(ROOM, RECEIVER, evidence, route)
    turn(sending, sender)
    turn(sending, sender)
    for group, region, table in zip(THEIRS.groups, theirs.regions, sender.pages, strict=True):
        for page in table:
            start = page * group.page_bytes
            region[start : start + group.page_bytes] = bytes([page + 1]) * group.page_bytes
    sending.computed(sender, len(PROMPT), Token(42), 1)
    record = asked(sending.take_requests(), SendRecord).record
    first = grant.prefix_tokens
    moved = between.runs(sender.pages, grant.pages, first, first, len(PROMPT), ends=True)
    for source, target, runs in zip(theirs.regions, ours.regions, moved, strict=True):
        for at, to, length in runs:
            target[to : to + length] = source[at : at + length]
    start = grant.slot * SLOT_BYTES
    ours.slots[start : start + SEAL_OFFSET] = record.pack()
    seal = seal_bytes(ROOM, grant.generation)
    ours.slots[start + SEAL_OFFSET : start + SEAL_OFFSET + len(seal)] = seal
    assert receiving.poll(receiver)
    turn(receiving, receiver)
    assert receiver.phase is Phase.SUCCESS
    return grant, record


def test_each_group_is_granted_sent_counted_and_admitted_by_its_own_pages(
    receiving: ReceivingSide[ReceivingRoom], sending: SendingSide[SendingRoom], ours: Memory, theirs: Memory
) -> None:
    grant, record = hand_over(receiving, sending, ours, theirs)
    assert tuple(map(len, grant.pages)) == record.pages == (6, 3), "11 tokens in pages of 2, and of 4"
    holding = receiving.holdings.get(ROOM)
    assert tuple(map(len, holding.pages)) == (8, 4), "with those of the answer"
    for group, region, table in zip(OURS.groups, ours.regions, grant.pages, strict=True):
        for page in table:
            assert all(region[page * group.page_bytes : (page + 1) * group.page_bytes]), "no byte is missing"
    assert holding.shared_tokens == 8, "whole blocks of both groups, for whoever begins alike"


def test_what_begins_alike_is_held_in_every_group_and_the_rest_alone_is_granted(
    receiving: ReceivingSide[ReceivingRoom], sending: SendingSide[SendingRoom], ours: Memory, theirs: Memory
) -> None:
    first, _ = hand_over(receiving, sending, ours, theirs)
    second, grant = granted(receiving, 8)
    assert grant.prefix_tokens == 8
    assert tuple(map(len, grant.pages)) == (2, 1)
    assert [table[:count] for table, count in zip(second.tables(0), (4, 2), strict=True)] == [
        table[:count] for table, count in zip(first.pages, (4, 2), strict=True)
    ]


def test_memory_as_used_a_room_grows_in_each_group_by_the_pages_that_it_lacks_there(
    receiving: ReceivingSide[ReceivingRoom], sending: SendingSide[SendingRoom], ours: Memory, theirs: Memory
) -> None:
    """Pages of 2 tokens, and of 4. A block is of 4, and a further choice begins behind two."""
    hand_over(receiving, sending, ours, theirs, max_tokens=12, further_seeds=(5,))
    room = receiving.roster.get(ROOM)
    held = [tuple(map(len, room.tables(choice))) for choice in range(2)]
    assert (held, room.covered) == ([(8, 4), (4, 2)], [16, 8])
    assert receiving.capacity().margin == (4, 2), "a block for each choice"
    assert receiving.space_for([(room, 0, 16), (room, 1, 11)]).given == 2 + 1
    assert receiving.space_for([(room, 0, 17), (room, 1, 12)]).given == 1 + 1, "the other one has its pages"
    assert receiving.space_for([(room, 0, 19)]).given == 1, "of one group alone"
    assert [tuple(map(len, room.tables(choice))) for choice in range(2)] == [(10, 5), (6, 3)]
    assert room.covered == [20, 12]


def test_a_room_waits_until_every_group_has_pages_for_it(receiving: ReceivingSide[ReceivingRoom]) -> None:
    _, short = receiving.holdings.pools
    held = short.reserve(PAGES - 3)
    room = receiving.open(ROOM, Request("request", PROMPT, 6), SENDER, 0)
    room.note(Connected())
    turn(receiving, room)
    assert room.pages_needed == (8, 4)
    turn(receiving, room, Vote.STAY)
    short.release(held)
    turn(receiving, room)
    assert room.phase is Phase.TRANSFERRING


def test_no_free_under_write_what_is_exposed_waits_in_every_group_for_a_proof(
    receiving: ReceivingSide[ReceivingRoom],
) -> None:
    room, _ = granted(receiving, ROOM)
    receiving.depart(SENDER)
    turn(receiving, room, Vote.ABORT)
    states = [pool.census()[PageState.QUARANTINED] for pool in receiving.holdings.pools]
    assert states == [6, 3]
    turn(receiving, room)
    assert receiving.holdings.available == (PAGES, PAGES)


def test_no_truncation_a_grant_that_is_short_in_one_group_is_refused(
    sending: SendingSide[SendingRoom], receiving: ReceivingSide[ReceivingRoom]
) -> None:
    room, grant = granted(receiving, ROOM)
    sending.open(ROOM, room.request, RECEIVER, 0)
    short = (grant.pages[0], grant.pages[1][:-1])
    route = Route(RECEIVER, OURS.page_tokens, ())
    for pages in (short, grant.pages[:1]):
        with pytest.raises(Truncated, match="pages granted, 6 \\+ 3 to be sent"):
            sending.grant(ROOM, RECEIVER, Granted(grant.generation, pages, grant.slot), route)
