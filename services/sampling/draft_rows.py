"""Computation of drafts as further rows of a step, and sampling of tokens behind accepted drafts.

Each draft is computed as a row of one token, of the sequence as if the drafts before it were its output. All
rows of a step write their keys and values before any attends, so each row sees those before it. A draft costs
as much as a row of a larger batch, by the same calls and kernels. If the result of a row does not
depend on the other rows, tokens behind drafts are those of single steps, to the last bit.

Tokens are sampled position by position, behind accepted drafts only. So penalties, the seed's position and
the grammar state are those of the output so far, and nothing has to be undone.
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
    """Copy of a sequence for one step, with some of a row's drafts appended to its output."""


def with_drafts(row: Row, drafts: int) -> SpeculatedSequence:
    """Return a copy of the row's sequence whose output includes the row's first `drafts` draft tokens.

    It shares the sampler state and the grammar state with the original.
    """
    sequence = row.sequence
    supposed = SpeculatedSequence(sequence.request, [*sequence.output, *row.drafts[:drafts]])
    supposed.sampler_state, supposed.fold = seen_tokens(sequence), sequence.fold
    return supposed


def split_drafts(rows: abc.Sequence[Row]) -> abc.Sequence[Row]:
    """Return the rows of a step with each draft as a row of its own, behind the row that it belongs to.

    The logits of these rows, taken in order, are those that `rows` want.
    """
    if not any(row.drafts for row in rows):
        return rows
    split: list[Row] = []
    for row in rows:
        split.append(replace(row, drafts=()))
        for index in range(len(row.drafts)):
            start = row.stop + index
            split.append(Row(with_drafts(row, index + 1), start, start + 1, row.tables, sample=True))
    return split


def sample_rows(logits: torch.Tensor, rows: abc.Sequence[Row]) -> list[list[DrawResult]]:
    """Sample tokens for each of `rows`: at its stop, and behind each draft that is accepted. Return a list of
    results per row.

    All of `rows` sample. `logits`: [N, vocabulary] with one line for each row and each of its drafts.
    """
    drawn: list[list[DrawResult]] = [[] for _ in rows]
    firsts = [0, *accumulate(1 + len(row.drafts) for row in rows)]
    open_rows, index = [*range(len(rows))], 0
    while open_rows:
        sequences = [with_drafts(rows[each], index) if index else rows[each].sequence for each in open_rows]
        here = [firsts[each] + index for each in open_rows]
        for each, draw in zip(open_rows, sample(_picked(logits, here), sequences), strict=True):
            drawn[each].append(draw)
        open_rows = [each for each in open_rows if _goes_on(rows[each].drafts, index, drawn[each][index])]
        index += 1
    return drawn


def _goes_on(drafts: abc.Sequence[int], index: int, drawn: DrawResult) -> bool:
    return index < len(drafts) and isinstance(drawn, Token) and drawn.id == drafts[index]


def _picked(logits: torch.Tensor, places: list[int]) -> torch.Tensor:
    if len(places) == len(logits):
        return logits
    if len(places) == 1:
        return logits[places[0] : places[0] + 1]
    return logits[torch.tensor(places, device=logits.device)]
