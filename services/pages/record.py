"""Byte format of a metadata slot: the record and the seal that a prefill worker writes besides KV pages.

One slot holds one record and, last, its seal. All words are little-endian.

```
offset  bytes
     0      4   magic
     4      4   schema
     8      8   room
    16      8   generation
    24      4   tokens that were computed: the prompt's, and those of an earlier room's output
    28      4   cached tokens (reused from the sender's prefix cache)
    32      4   first token
    36      4   first token's logprob, float
    40      2   alternatives, how many (LOGPROBS_NONE: the request wants no logprobs)
    42      2   groups of layers, how many
    44     16   pages written of each group: 4 x pages
    60    160   alternatives: 20 x (token, logprob)
   220      8   checksum of the pages of all groups (0: not computed)
   228      4   CRC-32 of bytes 0..228
   232     24   seal: room, generation, check word over both
```

The seal is written only after the writes of the record and of every page are DONE (`seal-last`). So nothing
relies on an order between two writes. A blank or incomplete seal counts as unwritten. A complete seal of
another room or generation is an error. Record bytes without a seal prove nothing, but show that the seal may
follow soon.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from baton.ids import Generation, PageCounts, RoomId
from baton.pages.errors import RecordCorrupt, RecordForeign
from baton.pages.layout import GROUPS_MAX

SLOT_BYTES: Final = 256
SEAL_OFFSET: Final = 232
SEAL_BYTES: Final = 24
ALTERNATIVES_MAX: Final = 20
LOGPROBS_NONE: Final = 0xFFFF
SCHEMA: Final = 2
_MAGIC: Final = 0x4E544142  # "BATN"
_HEAD: Final = struct.Struct(f"<IIQQIIIfHH{GROUPS_MAX}I")
_ALTERNATIVE: Final = struct.Struct("<If")
_TAIL: Final = struct.Struct("<Q")
_CRC: Final = struct.Struct("<I")
_SEAL: Final = struct.Struct("<QQQ")
_CHECKED_BYTES: Final = 228

BLANK_SEAL: Final = bytes(SEAL_BYTES)
_BLANK_MAGIC: Final = bytes(4)
SCHEMA_HASH: Final = f"record-{SCHEMA}-{SLOT_BYTES}-{SEAL_OFFSET}-{ALTERNATIVES_MAX}-{GROUPS_MAX}"
"""Identifier of the byte format of metadata records. Workers with different ones cannot hand over to each
other."""


@dataclass(frozen=True, slots=True)
class MetadataRecord:
    room: RoomId
    generation: Generation
    prompt_tokens: int
    cached_tokens: int
    pages: PageCounts
    """Number of pages that the sender wrote for this room, by KV group. The receiver expects exactly as
    many."""
    first_token: int
    first_logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()
    pages_checksum: int = 0

    def pack(self) -> bytes:
        """Return the bytes of a metadata slot up to its seal: SEAL_OFFSET bytes. Raises ValueError for values
        that do not fit their fields."""
        if len(self.pages) > GROUPS_MAX:
            raise ValueError(f"pages of {len(self.pages)} groups, a record counts those of {GROUPS_MAX}")
        if len(self.alternatives) > ALTERNATIVES_MAX:
            raise ValueError(f"{len(self.alternatives)} alternatives, a record holds {ALTERNATIVES_MAX}")
        has_logprobs = self.first_logprob is not None
        if self.alternatives and not has_logprobs:
            raise ValueError("alternatives without the first token's own logprob")
        count = len(self.alternatives) if has_logprobs else LOGPROBS_NONE
        try:
            head = _HEAD.pack(
                _MAGIC,
                SCHEMA,
                self.room,
                self.generation,
                self.prompt_tokens,
                self.cached_tokens,
                self.first_token,
                self.first_logprob if self.first_logprob is not None else 0.0,
                count,
                len(self.pages),
                *self.pages,
                *(0,) * (GROUPS_MAX - len(self.pages)),
            )
            alternatives = b"".join(_ALTERNATIVE.pack(token, logprob) for token, logprob in self.alternatives)
            tail = _TAIL.pack(self.pages_checksum)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"a value does not fit the metadata record: {error}") from error
        body = head + alternatives.ljust(_ALTERNATIVE.size * ALTERNATIVES_MAX, b"\0") + tail
        return (body + _CRC.pack(zlib.crc32(body))).ljust(SEAL_OFFSET, b"\0")


def seal_bytes(room: RoomId, generation: Generation) -> bytes:
    """Return the seal of a room, the mark that all is written: the SEAL_BYTES bytes that are written last, at
    SEAL_OFFSET of its slot."""
    return _SEAL.pack(room, generation, _check(room, generation))


def announced(slot: memoryview) -> bool:
    """Return whether a sender has written to the record's part of a slot, so that the seal may follow soon.
    The record itself is not checked."""
    return slot[: len(_BLANK_MAGIC)] != _BLANK_MAGIC


def read_slot(
    slot: memoryview, room: RoomId, generation: Generation, *, check_sum: bool = True
) -> MetadataRecord | None:
    """Return the metadata record in a slot, or None while the slot is not sealed.

    `room`, `generation`: owner of the slot. `check_sum`: whether to check the record's checksum. Raises
    RecordForeign if another owner sealed the slot, and RecordCorrupt if the sealed record has wrong content.
    """
    sealed_room, sealed_generation, check = _SEAL.unpack_from(slot, SEAL_OFFSET)
    if check != _check(sealed_room, sealed_generation):
        return None
    if (sealed_room, sealed_generation) != (room, generation):
        raise RecordForeign(
            f"slot sealed by room {sealed_room} generation {sealed_generation},"
            f" its owner is room {room} generation {generation}"
        )
    return _read_record(bytes(slot[:SEAL_OFFSET]), room, generation, check_sum=check_sum)


def _read_record(body: bytes, room: RoomId, generation: Generation, *, check_sum: bool) -> MetadataRecord:
    checked, rest = body[:_CHECKED_BYTES], body[_CHECKED_BYTES:]
    if check_sum and rest != _CRC.pack(zlib.crc32(checked)).ljust(len(rest), b"\0"):
        raise RecordCorrupt(f"record of room {room}: checksum does not hold")
    magic, schema, its_room, its_generation, prompt, cached, first, logprob, count, groups, *pages = (
        _HEAD.unpack_from(body)
    )
    if (magic, schema, its_room, its_generation) != (_MAGIC, SCHEMA, room, generation):
        raise RecordCorrupt(
            f"record of room {room}: header names {magic:#x}/{schema}/{its_room}/{its_generation}"
        )
    if count != LOGPROBS_NONE and count > ALTERNATIVES_MAX:
        raise RecordCorrupt(f"record of room {room}: {count} alternatives")
    if groups > GROUPS_MAX:
        raise RecordCorrupt(f"record of room {room}: pages of {groups} groups")
    listed = 0 if count == LOGPROBS_NONE else count
    return MetadataRecord(
        room=room,
        generation=generation,
        prompt_tokens=prompt,
        cached_tokens=cached,
        pages=tuple(pages[:groups]),
        first_token=first,
        first_logprob=None if count == LOGPROBS_NONE else logprob,
        alternatives=tuple(
            _ALTERNATIVE.unpack_from(body, _HEAD.size + i * _ALTERNATIVE.size) for i in range(listed)
        ),
        pages_checksum=_TAIL.unpack_from(body, _CHECKED_BYTES - _TAIL.size)[0],
    )


def _check(room: RoomId, generation: Generation) -> int:
    """Return the check word of a seal: a 64-bit hash of room id and generation. It is never 0, so that a
    blank seal is invalid."""
    value = (room * 0x9E3779B97F4A7C15 + generation * 0xC2B2AE3D27D4EB4F + 1) & 0xFFFFFFFFFFFFFFFF
    value ^= value >> 31
    value = (value * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 29)) or 1
