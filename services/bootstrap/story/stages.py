"""Where did the time of a request go? The steps on its way, each from one line to the next."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Final

from services.bootstrap.story.clocks import BOOTSTRAP
from services.bootstrap.story.parts import Line, RequestStep
from services.rooms.entries import RoomEntry
from services.rooms.phases import Side

P, D, B = Side.PREFILL.value, Side.DECODE.value, BOOTSTRAP

STAGES: Final = (
    ("waits for a pair of workers", (B, "queued"), (B, "opened"), True),
    ("prefill accepts", (B, "opened"), (P, "accepted"), False),
    ("decode accepts", (B, "opened"), (D, "accepted"), True),
    ("decode reserves pages", (D, "accepted"), (D, "granted"), True),
    ("prefill hears where to", (D, "granted"), (P, "destination known"), True),
    ("waits at prefill", (P, "destination known"), (P, "computing"), True),
    ("computes the prompt", (P, "computing"), (P, "first token"), True),
    ("first token to the bootstrap", (P, "first token"), (B, "first token passed on"), True),
    ("sends the rest, and seals", (P, "first token"), (P, "sealed"), False),
    ("decode sees the seal", (P, "sealed"), (D, "landed"), False),
    ("decode admits", (D, "landed"), (D, "admitted"), False),
    ("decodes", (D, "admitted"), (D, "finished"), False),
)
"""Those that are on the way to the first token follow each other without a gap."""


def stages_of(entry: RoomEntry, lines: Sequence[Line]) -> Iterator[RequestStep]:
    """Those whose two ends the room reached. None goes on behind its failure: what its workers did of it
    later is not where its time went."""
    names = {B: B, P: entry.prefill.name, D: entry.decode.name}
    first: dict[tuple[str, str], float] = {}
    for line in lines:
        first.setdefault((line.lane, line.name), line.at_ms)
    failed_ms = first.get((B, "failed"), inf)
    for text, (role, name), (to_role, to_name), counts in STAGES:
        begin, end = first.get((names[role], name)), first.get((names[to_role], to_name))
        if begin is not None and end is not None and begin < failed_ms:
            ms = max(min(end, failed_ms) - begin, 0.0)
            yield RequestStep(str(entry.id), text, round(ms, 3), counts)
