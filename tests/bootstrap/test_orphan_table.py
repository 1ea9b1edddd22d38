"""Tests of the table of rooms that this bootstrap may adopt."""

import asyncio
from dataclasses import replace
from typing import Final

import pytest

from baton.bootstrap.admission.orphan_table import FoundOrphan, OrphanTable
from baton.ids import NO_PEER, Incarnation, RoomId
from baton.rooms.request import Grammar, GrammarKind, Request, Sampling
from baton.rooms.trace import read_trace
from baton.wire.baton.v1 import workers_pb2
from baton.wire.conversions import Malformed, request_from_wire, request_to_wire
from baton.wire.load_messages import (
    KEY_BYTES,
    ORPHANS_MAX,
    Orphan,
    adoption_key,
    orphans_from_wire,
    orphans_to_wire,
)

KEY: Final = bytes(KEY_BYTES)
ONE: Final = Orphan(RoomId(7), KEY, Incarnation(3))
HERE, THERE = Incarnation(1), Incarnation(2)
ASKED: Final = Request(
    "request-1",
    (1, 2, 3),
    max_tokens=9,
    eos_token_ids=(5, 4),
    stop_token_ids=(8,),
    sampling=Sampling(temperature=0.7, seed=11, logit_bias=((9, 1.5), (2, -1.0))),
    grammar=Grammar(GrammarKind.REGEX, "a+"),
    further_seeds=(12, 13),
    salt=77,
)


async def test_an_orphan_is_taken_once() -> None:
    table = OrphanTable()
    table.update(HERE, [ONE])
    assert await table.take(KEY, 0) == FoundOrphan(ONE, HERE)
    assert await table.take(KEY, 0) is None
    table.update(HERE, [ONE])
    assert await table.take(KEY, 0) == FoundOrphan(ONE, HERE), "its worker still has it"


async def test_an_orphan_that_is_reported_later_is_waited_for() -> None:
    table = OrphanTable()
    taking = asyncio.create_task(table.take(KEY, 60))
    await asyncio.sleep(0)
    table.update(THERE, [replace(ONE, key=b"another key 1234")])
    await asyncio.sleep(0)
    assert not taking.done()
    table.update(HERE, [ONE])
    assert await taking == FoundOrphan(ONE, HERE)


async def test_a_report_replaces_the_one_before_it_and_a_lost_worker_has_none() -> None:
    table = OrphanTable()
    table.update(HERE, [ONE])
    table.update(THERE, [replace(ONE, key=b"another key 1234")])
    table.update(HERE, [])
    assert await table.take(KEY, 0) is None
    assert len(table) == 1
    table.update(THERE, [])
    assert len(table) == 0


async def test_of_two_orphans_with_one_key_the_other_stays() -> None:
    table = OrphanTable()
    table.update(HERE, [ONE])
    table.update(THERE, [ONE])
    table.update(HERE, [])
    assert await table.take(KEY, 0) == FoundOrphan(ONE, THERE)


def test_the_key_is_of_all_that_tokens_depend_on_and_of_nothing_else() -> None:
    key = adoption_key(ASKED)
    assert len(key) == KEY_BYTES
    assert adoption_key(request_from_wire(request_to_wire(ASKED, 5.0))) == key, "a worker has the same"
    same = replace(
        ASKED, output=(1, 2), arrived_ms=5, carried_tokens_max=6, tenant=b"t", resumes=True, priority=2
    )
    assert adoption_key(replace(same, trace=read_trace(f"00-{'1' * 32}-{'2' * 16}-01", None))) == key
    others = (
        replace(ASKED, request_id="request-2"),
        replace(ASKED, prompt=(1, 2)),
        replace(ASKED, sampling=replace(ASKED.sampling, seed=12)),
        replace(ASKED, further_seeds=(12,)),
        replace(ASKED, salt=78),
        replace(ASKED, max_tokens=8),
        replace(ASKED, grammar=None),
    )
    assert len({key, *map(adoption_key, others)}) == 1 + len(others)


def test_orphans_pass_the_wire_and_are_bounded() -> None:
    orphans = [ONE, Orphan(RoomId(8), b"another key 1234", NO_PEER)]
    assert orphans_from_wire(orphans_to_wire(orphans)) == orphans
    assert len(orphans_to_wire([ONE] * (ORPHANS_MAX + 1))) == ORPHANS_MAX


@pytest.mark.parametrize(
    "wire",
    [[workers_pb2.Orphan(room=1, key=b"short")], [workers_pb2.Orphan(room=1, key=KEY)] * (ORPHANS_MAX + 1)],
)
def test_malformed_is_contained_other_orphans_are_refused(wire: list[workers_pb2.Orphan]) -> None:
    with pytest.raises(Malformed):
        orphans_from_wire(wire)
