"""Tests of the record in a slot: reading it gives the owner's whole record, nothing, or an error."""

import math
import struct
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import Generation, RoomId
from baton.pages.errors import RecordCorrupt, RecordForeign
from baton.pages.layout import GROUPS_MAX
from baton.pages.record import (
    ALTERNATIVES_MAX,
    SEAL_BYTES,
    SEAL_OFFSET,
    SLOT_BYTES,
    MetadataRecord,
    read_slot,
    seal_bytes,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
PAGES = st.lists(U32, min_size=1, max_size=GROUPS_MAX).map(tuple)
LOGPROB = st.floats(width=32, allow_nan=False, max_value=0)
ALTERNATIVES = st.lists(st.tuples(U32, LOGPROB), max_size=ALTERNATIVES_MAX).map(tuple)
NAMES = st.tuples(st.integers(1, 2**64 - 1).map(RoomId), st.integers(1, 2**64 - 1).map(Generation))


@st.composite
def records(draw: st.DrawFn) -> MetadataRecord:
    room, generation = draw(NAMES)
    logprob = draw(st.none() | LOGPROB)
    return MetadataRecord(
        room=room,
        generation=generation,
        prompt_tokens=draw(U32),
        cached_tokens=draw(U32),
        pages=draw(PAGES),
        first_token=draw(U32),
        first_logprob=logprob,
        alternatives=() if logprob is None else draw(ALTERNATIVES),
        pages_checksum=draw(U64),
    )


ROOM, GENERATION = RoomId(1), Generation(1)
SAMPLE = MetadataRecord(RoomId(7), Generation(3), 100, 16, (6, 2), 42, -0.5, ((42, -0.5), (17, -1.25)), 99)


def slot_of(record: MetadataRecord) -> bytearray:
    slot = bytearray(SLOT_BYTES)
    slot[:SEAL_OFFSET] = record.pack()
    slot[SEAL_OFFSET : SEAL_OFFSET + SEAL_BYTES] = seal_bytes(record.room, record.generation)
    return slot


def read(
    slot: bytearray, room: RoomId = SAMPLE.room, generation: Generation = SAMPLE.generation
) -> MetadataRecord | None:
    return read_slot(memoryview(slot), room, generation)


@given(records())
def test_what_was_packed_is_read(record: MetadataRecord) -> None:
    assert read(slot_of(record), record.room, record.generation) == record


@given(records())
def test_the_body_fits_before_the_seal(record: MetadataRecord) -> None:
    assert len(record.pack()) == SEAL_OFFSET
    assert SEAL_OFFSET + SEAL_BYTES <= SLOT_BYTES


def test_slot_zero_a_blank_slot_is_unwritten() -> None:
    assert read(bytearray(SLOT_BYTES)) is None


def test_seal_last_a_record_without_its_seal_is_unwritten() -> None:
    slot = slot_of(SAMPLE)
    slot[SEAL_OFFSET:] = bytes(SLOT_BYTES - SEAL_OFFSET)
    assert read(slot) is None


@pytest.mark.parametrize("landed", range(SEAL_BYTES))
def test_a_torn_seal_is_unwritten(landed: int) -> None:
    """However many of its bytes have landed, from either end."""
    whole = slot_of(SAMPLE)[SEAL_OFFSET : SEAL_OFFSET + SEAL_BYTES]
    for torn in (
        whole[:landed].ljust(SEAL_BYTES, b"\0"),
        whole[SEAL_BYTES - landed :].rjust(SEAL_BYTES, b"\0"),
    ):
        if torn == whole:
            continue  # the missing bytes are zero anyway
        slot = slot_of(SAMPLE)
        slot[SEAL_OFFSET : SEAL_OFFSET + SEAL_BYTES] = torn
        assert read(slot) is None


@given(NAMES, NAMES, st.sets(st.sampled_from(range(0, SEAL_BYTES, 8)), min_size=1, max_size=2))
def test_a_seal_mixed_of_two_tenants_is_unwritten(
    mine: tuple[RoomId, Generation], theirs: tuple[RoomId, Generation], words: set[int]
) -> None:
    mixed = bytearray(seal_bytes(*mine))
    for word in words:
        mixed[word : word + 8] = seal_bytes(*theirs)[word : word + 8]
    slot = bytearray(SLOT_BYTES)
    slot[SEAL_OFFSET : SEAL_OFFSET + SEAL_BYTES] = mixed
    if bytes(mixed) == seal_bytes(*mine):
        return
    if bytes(mixed) == seal_bytes(*theirs):
        with pytest.raises(RecordForeign):
            read(slot, *mine)
        return
    assert read(slot, *mine) is None


@given(st.integers(0, SEAL_OFFSET - 1), st.integers(1, 255))
def test_every_corrupt_byte_of_the_record_is_found(offset: int, flip: int) -> None:
    slot = slot_of(SAMPLE)
    slot[offset] ^= flip
    with pytest.raises(RecordCorrupt):
        read(slot)


@pytest.mark.parametrize("offset", range(SEAL_OFFSET, SEAL_OFFSET + SEAL_BYTES))
@pytest.mark.parametrize("flip", [1, 0x80, 0xFF])
def test_every_corrupt_byte_of_the_seal_reads_unwritten(offset: int, flip: int) -> None:
    slot = slot_of(SAMPLE)
    slot[offset] ^= flip
    assert read(slot) is None


@given(NAMES.filter(lambda names: names != (SAMPLE.room, SAMPLE.generation)))
def test_slot_owner_a_foreign_seal_is_an_error_and_never_a_wait(owner: tuple[RoomId, Generation]) -> None:
    with pytest.raises(RecordForeign, match=f"sealed by room {SAMPLE.room} generation {SAMPLE.generation}"):
        read(slot_of(SAMPLE), *owner)


def test_a_record_under_anothers_seal_is_corrupt() -> None:
    slot = slot_of(SAMPLE)
    slot[SEAL_OFFSET : SEAL_OFFSET + SEAL_BYTES] = seal_bytes(RoomId(8), Generation(4))
    with pytest.raises(RecordCorrupt, match="header names"):
        read(slot, RoomId(8), Generation(4))


def test_a_record_that_counts_more_than_it_can_hold_is_corrupt() -> None:
    """The record is written by a peer that checks nothing, and its own checksum is right."""
    for offset, count, told in ((40, ALTERNATIVES_MAX + 1, "21 alternatives"), (42, 5, "pages of 5 groups")):
        slot = slot_of(SAMPLE)
        slot[offset : offset + 2] = struct.pack("<H", count)
        slot[228:232] = struct.pack("<I", zlib.crc32(slot[:228]))
        with pytest.raises(RecordCorrupt, match=told):
            read(slot)


@pytest.mark.parametrize(
    "changes", [{"first_token": -1}, {"pages": (2**32,)}, {"room": 2**64}, {"prompt_tokens": -5}]
)
def test_record_fits_what_does_not_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not fit the metadata record"):
        replace(SAMPLE, **changes).pack()


def test_record_fits_a_logprob_that_no_float_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit the metadata record"):
        MetadataRecord(ROOM, GENERATION, 1, 0, (1,), 5, first_logprob=-1e300).pack()


def test_record_fits_alternatives_are_bounded_and_need_the_tokens_own() -> None:
    many = tuple((token, -1.0) for token in range(ALTERNATIVES_MAX + 1))
    with pytest.raises(ValueError, match="21 alternatives, a record holds 20"):
        MetadataRecord(ROOM, GENERATION, 1, 0, (1,), 5, -0.5, many).pack()
    with pytest.raises(ValueError, match="without the first token's own logprob"):
        MetadataRecord(ROOM, GENERATION, 1, 0, (1,), 5, None, ((5, -0.5),)).pack()


def test_record_fits_the_pages_of_more_groups_than_a_layout_has_are_refused() -> None:
    with pytest.raises(ValueError, match="pages of 5 groups, a record counts those of 4"):
        replace(SAMPLE, pages=(1,) * 5).pack()


def test_an_impossible_token_keeps_its_logprob() -> None:
    record = MetadataRecord(ROOM, GENERATION, 1, 0, (1,), 5, -math.inf, ((5, -math.inf),))
    assert read(slot_of(record), ROOM, GENERATION) == record


def test_a_seal_is_never_blank() -> None:
    """A room and generation whose check word would be 0 still seal."""
    for room in range(1, 2000):
        assert struct.unpack_from("<Q", seal_bytes(RoomId(room), GENERATION), 16)[0] != 0
