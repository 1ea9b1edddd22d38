"""Random tests of slots: any bytes read as the owner's record, as unwritten, as corrupt, or as another
room's."""

import math
import struct
import zlib
from contextlib import suppress
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import Generation, RoomId
from baton.pages.errors import RecordCorrupt, RecordForeign
from baton.pages.layout import GROUPS_MAX
from baton.pages.record import (
    ALTERNATIVES_MAX,
    LOGPROBS_NONE,
    SEAL_BYTES,
    SEAL_OFFSET,
    SLOT_BYTES,
    MetadataRecord,
    read_slot,
    seal_bytes,
)

U32: Final = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**31, 2**32 - 1])
U64: Final = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63, 2**64 - 1])
LOGPROBS: Final = st.floats(width=32)
"""NaN and the infinities too: the engine of a peer may be broken."""
ANY_INT: Final = st.integers(-(2**65), 2**65)
CRC_OFFSET: Final = 228
LOGPROB_OFFSET: Final = 36
COUNT_OFFSET: Final = 40


@st.composite
def records(draw: st.DrawFn) -> MetadataRecord:
    logprob = draw(st.none() | LOGPROBS)
    several = st.lists(st.tuples(U32, LOGPROBS), max_size=ALTERNATIVES_MAX).map(tuple)
    return MetadataRecord(
        room=RoomId(draw(U64)),
        generation=Generation(draw(U64)),
        prompt_tokens=draw(U32),
        cached_tokens=draw(U32),
        pages=draw(st.lists(U32, min_size=1, max_size=GROUPS_MAX).map(tuple)),
        first_token=draw(U32),
        first_logprob=logprob,
        alternatives=() if logprob is None else draw(several),
        pages_checksum=draw(U64),
    )


def slot_of(record: MetadataRecord) -> bytearray:
    seal = seal_bytes(record.room, record.generation)
    return bytearray((record.pack() + seal).ljust(SLOT_BYTES, b"\0"))


def correct(slot: bytearray) -> None:
    """Make the slot's checksum right for its content, as a malicious peer could."""
    slot[CRC_OFFSET:SEAL_OFFSET] = struct.pack("<I", zlib.crc32(slot[:CRC_OFFSET]))


def seen(
    slot: bytes | bytearray, room: RoomId, generation: Generation
) -> MetadataRecord | type[Exception] | None:
    """Return the record that is read from a slot, or the type of its error. Any error but two is raised, with
    the checksum checked or not."""
    with suppress(RecordCorrupt, RecordForeign):
        unsummed = read_slot(memoryview(slot), room, generation, check_sum=False)
        assert unsummed is None or len(unsummed.alternatives) <= ALTERNATIVES_MAX
    try:
        record = read_slot(memoryview(slot), room, generation)
    except (RecordCorrupt, RecordForeign) as error:
        return type(error)
    if record is not None:
        assert (record.room, record.generation) == (room, generation)
        assert len(record.alternatives) <= ALTERNATIVES_MAX
        assert record.first_logprob is not None or record.alternatives == ()
        assert record.pack()[:LOGPROB_OFFSET] == bytes(slot[:LOGPROB_OFFSET])
    return record


@given(records())
def test_what_fits_is_read_as_it_was_packed(record: MetadataRecord) -> None:
    read = seen(slot_of(record), record.room, record.generation)
    assert isinstance(read, MetadataRecord)
    assert read.pack() == record.pack()
    if not math.isnan(record.first_logprob or 0.0):
        assert read.first_logprob == record.first_logprob


@given(st.binary(min_size=SLOT_BYTES, max_size=SLOT_BYTES), U64, U64)
def test_noise_is_unwritten(slot: bytes, room: RoomId, generation: Generation) -> None:
    """Random bytes are a valid seal with a chance of 2^-64 only."""
    assert seen(slot, room, generation) is None


@given(st.binary(max_size=SEAL_OFFSET), U64, U64)
def test_noise_under_a_whole_seal_is_corrupt(body: bytes, room: RoomId, generation: Generation) -> None:
    slot = bytearray((body.ljust(SEAL_OFFSET, b"\0") + seal_bytes(room, generation)).ljust(SLOT_BYTES, b"\0"))
    assert seen(slot, room, generation) is RecordCorrupt
    correct(slot)
    assert seen(slot, room, generation) is RecordCorrupt, "its header names nobody"


@given(records(), st.lists(st.integers(0, SLOT_BYTES * 8 - 1), min_size=1, max_size=8, unique=True))
def test_flipped_bits_are_never_read(record: MetadataRecord, bits: list[int]) -> None:
    slot = slot_of(record)
    for bit in bits:
        slot[bit // 8] ^= 1 << bit % 8
    seal_end = SEAL_OFFSET + SEAL_BYTES
    touched = {SEAL_OFFSET <= bit // 8 < seal_end for bit in bits if bit // 8 < seal_end}
    found = seen(slot, record.room, record.generation)
    if not touched:
        assert isinstance(found, MetadataRecord), "nothing lies behind the seal"
    else:
        assert found is (None if True in touched else RecordCorrupt)


@given(
    records(), st.integers(0, SLOT_BYTES), st.booleans(), st.binary(min_size=SLOT_BYTES, max_size=SLOT_BYTES)
)
def test_a_part_of_a_slot_says_all_or_nothing(
    record: MetadataRecord, landed: int, from_the_end: bool, before: bytes
) -> None:
    """A write has come as far as `landed` bytes, from either end, over any earlier content."""
    whole = bytes(slot_of(record))
    slot = before[:-landed] + whole[-landed:] if from_the_end and landed else whole[:landed] + before[landed:]
    if from_the_end and not landed:
        slot = before
    found = seen(slot, record.room, record.generation)
    if isinstance(found, MetadataRecord):
        assert found.pack() == record.pack()
    else:
        assert found in (None, RecordCorrupt)


@given(records(), st.sampled_from([1, 7, 8, 9, 15, 16, 17, 23]))
def test_a_torn_seal_over_anothers_is_neithers(record: MetadataRecord, landed: int) -> None:
    """The words of two tenants' seals, mixed."""
    other = seal_bytes(RoomId(record.room ^ 1), Generation(record.generation ^ 1))
    mine = seal_bytes(record.room, record.generation)
    slot = slot_of(record)
    slot[SEAL_OFFSET : SEAL_OFFSET + SEAL_BYTES] = mine[:landed] + other[landed:]
    assert not isinstance(seen(slot, record.room, record.generation), MetadataRecord) or (
        mine[landed:] == other[landed:]
    )


@given(records(), st.integers(ALTERNATIVES_MAX + 1, LOGPROBS_NONE - 1))
def test_a_count_past_the_limit_is_corrupt_whatever_its_checksum(record: MetadataRecord, count: int) -> None:
    slot = slot_of(record)
    slot[COUNT_OFFSET : COUNT_OFFSET + 2] = struct.pack("<H", count)
    correct(slot)
    assert seen(slot, record.room, record.generation) is RecordCorrupt


@given(records(), st.binary(min_size=CRC_OFFSET - 24, max_size=CRC_OFFSET - 24))
def test_any_content_of_a_peer_that_lies_is_bounded(record: MetadataRecord, content: bytes) -> None:
    """The header, seal and checksum are right, and all between them is random."""
    slot = slot_of(record)
    slot[24:CRC_OFFSET] = content
    correct(slot)
    seen(slot, record.room, record.generation)


@given(records(), U64, U64)
def test_exact_match_only_its_owner_reads_a_slot(
    record: MetadataRecord, room: RoomId, generation: Generation
) -> None:
    found = seen(slot_of(record), room, generation)
    if (room, generation) == (record.room, record.generation):
        assert isinstance(found, MetadataRecord)
    else:
        assert found is RecordForeign


@given(
    st.lists(ANY_INT, min_size=7, max_size=7),
    st.none() | st.floats(),
    st.lists(st.tuples(ANY_INT, st.floats())),
)
def test_what_does_not_fit_is_refused_as_a_whole(
    numbers: list[int], logprob: float | None, alternatives: list[tuple[int, float]]
) -> None:
    room, generation, prompt, cached, pages, first, checksum = numbers
    record = MetadataRecord(
        RoomId(room),
        Generation(generation),
        prompt,
        cached,
        (pages,),
        first,
        logprob,
        tuple(alternatives),
        checksum,
    )
    try:
        packed = record.pack()
    except ValueError:
        return
    assert len(packed) == SEAL_OFFSET
    seen(slot_of(record), record.room, record.generation)


@pytest.mark.parametrize("length", [0, SEAL_OFFSET, SLOT_BYTES - SEAL_BYTES, SEAL_OFFSET + SEAL_BYTES - 1])
def test_less_than_a_slot_is_a_bug_here_and_no_record(length: int) -> None:
    with pytest.raises(struct.error):
        read_slot(memoryview(bytes(length)), RoomId(1), Generation(1))
