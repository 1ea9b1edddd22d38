"""How are a row's drafts computed, and which tokens are drawn behind them?

Each draft is fed as a row of one token, of the sequence as if the drafts before it were its output. All rows
of a step write before any looks, so that each finds the keys and values of those before it. So a draft costs
what a row of a larger batch costs, by the same calls, replays and kernels; and where what a row gets does not
depend on what else is in the step, the draws behind it are those of steps of one token, to the last bit.

Draws are made position by position, behind drafts that were drawn alone: penalties, the seed's position and
the grammar's fold are those of the output so far, and nothing is to be taken back.
"""

from collections import abc
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from baton.engine_interface import DrawResult, Row, Sequence
from baton.rooms.request import Token
from baton.sampling.penalties import seen_tokens
from baton.sampling.sampler import sample


@dataclass(slots=True, eq=False)
class SpeculatedSequence(Sequence):
    """A sequence as if some of a row's drafts were its output: of one step."""


def with_drafts(row: Row, drafts: int) -> SpeculatedSequence:
    """The row's sequence with so many of its drafts. It shares the sampler state and the fold, which go
    on by whatever is drawn for it."""
    sequence = row.sequence
    supposed = SpeculatedSequence(sequence.request, [*sequence.output, *row.drafts[:drafts]])
    supposed.sampler_state, supposed.fold = seen_tokens(sequence), sequence.fold
    return supposed


def split_drafts(rows: abc.Sequence[Row]) -> abc.Sequence[Row]:
    """Each row without its drafts, and behind it one for each of them: what they want, one after the other,
    is what `rows` want."""
    if not any(row.drafts for row in rows):
        return rows
    told: list[Row] = []
    for row in rows:
        told.append(replace(row, drafts=()))
        for place in range(len(row.drafts)):
            start = row.stop + place
            told.append(Row(with_drafts(row, place + 1), start, start + 1, row.tables, sample=True))
    return told


def sample_rows(logits: torch.Tensor, rows: abc.Sequence[Row]) -> list[list[DrawResult]]:
    """What is drawn for each of `rows`, all of which sample: at its stop, and behind each draft as long as
    they are what is drawn. `logits`: [their draws, vocabulary], row by row."""
    drawn: list[list[DrawResult]] = [[] for _ in rows]
    firsts = [0, *accumulate(1 + len(row.drafts) for row in rows)]
    going, place = [*range(len(rows))], 0
    while going:
        sequences = [with_drafts(rows[each], place) if place else rows[each].sequence for each in going]
        here = [firsts[each] + place for each in going]
        for each, told in zip(going, sample(_picked(logits, here), sequences), strict=True):
            drawn[each].append(told)
        going = [each for each in going if _goes_on(rows[each].drafts, place, drawn[each][place])]
        place += 1
    return drawn


def _goes_on(drafts: abc.Sequence[int], place: int, drawn: DrawResult) -> bool:
    return place < len(drafts) and isinstance(drawn, Token) and drawn.id == drafts[place]


def _picked(logits: torch.Tensor, places: list[int]) -> torch.Tensor:
    if len(places) == len(logits):
        return logits
    if len(places) == 1:
        return logits[places[0] : places[0] + 1]
    return logits[torch.tensor(places, device=logits.device)]
