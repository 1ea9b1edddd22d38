"""How does every rank of a worker come by what some of them know: tokens drawn, scores, sums of pages?

Tokens go as numbers whose count follows from the step's rows, so that all ranks know it beforehand: for each
draw that a row may make its id, or NONE, and, where they are asked for, log-probabilities. Draws that were
not made are zeros. A double holds ids and single-precision logarithms exactly.
"""

from collections import abc
from itertools import accumulate
from math import isnan
from typing import Final

import torch

from baton.engine.ranks.collectives import Team
from baton.engine_interface import (
    PROPOSED_MAX,
    DrawResult,
    GrammarUnsatisfied,
    LogitsNotFinite,
    PageSum,
    Row,
    RowResult,
    take,
)
from baton.pages.layout import GroupHead, KvLayout
from baton.pages.rank_layout import rank_layout
from baton.rooms.request import Score, Token
from baton.sampling.draft_rows import sample_rows
from baton.sampling.prompt_scores import score
from baton.sampling.proposer import Proposer, proposal_requests

NONE: Final[abc.Mapping[type[LogitsNotFinite] | type[GrammarUnsatisfied], float]] = {
    LogitsNotFinite: -1.0,
    GrammarUnsatisfied: -2.0,
}
"""The id where nothing could be drawn, by why."""
PROPOSAL_NUMBERS: Final = 2 + PROPOSED_MAX
"""Numbers sent for one proposal: token count, forced count, then the tokens."""


def draw(
    team: Team, drawer: int, logits: torch.Tensor | None, rows: abc.Sequence[Row], vocabulary: int
) -> list[RowResult]:
    """The tokens of each of `rows`, all of which sample, the same on every rank. `logits`: [their draws,
    vocabulary] on rank `drawer`, row by row."""
    if team.topology.ranks == 1 and logits is not None:
        return [take(row.drafts, drawn) for row, drawn in zip(rows, sample_rows(logits, rows), strict=True)]
    if not rows:
        return []
    counts = [row.sequence.request.sampling.tops(vocabulary) for row in rows]
    sizes = [_length(count) * (1 + len(row.drafts)) for row, count in zip(rows, counts, strict=True)]
    words: list[float] | None = None
    if team.rank == drawer:
        if logits is None:
            raise AssertionError(f"rank {drawer} is to draw and has no logits")
        words = []
        for drawn, count, size in zip(sample_rows(logits, rows), counts, sizes, strict=True):
            mine = [word for each in drawn for word in _words(each, count)]
            words += mine + [0.0] * (size - len(mine))
    told = team.tell(drawer, words, sum(sizes))
    parts = [told[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [
        take(row.drafts, _draws(iter(part), count))
        for row, part, count in zip(rows, parts, counts, strict=True)
    ]


def broadcast_scores(
    team: Team, drawer: int, logits: abc.Sequence[torch.Tensor], rows: abc.Sequence[Row], vocabulary: int
) -> list[bool]:
    """Carry the scores of `rows`, all of which have some, on by what they want for that. `logits`: of each,
    [its positions, vocabulary], on rank `drawer`. Whether the logits of each row were numbers."""
    counts = [_top_of(row, vocabulary) for row in rows]
    sizes = [len(row.scored) * (2 + 2 * count) for row, count in zip(rows, counts, strict=True)]
    words: list[float] | None = None
    if team.rank == drawer:
        words = [
            word
            for row, part, count in zip(rows, logits, counts, strict=True)
            for word in score(part, row.sequence.tokens(row.scored.start + 1, row.scored.stop + 1), count)
        ]
    told = team.tell(drawer, words, sum(sizes))
    numbers = []
    for row, count, size, end in zip(rows, counts, sizes, accumulate(sizes), strict=True):
        new = [_score(told[place : place + 2 + 2 * count]) for place in range(end - size, end, 2 + 2 * count)]
        numbers.append(not any(isnan(each.logprob) for each in new))
        if row.sequence.scores is not None:
            row.sequence.scores.told += new
    return numbers


def broadcast_proposals(
    team: Team, drawer: int, proposer: Proposer, rows: abc.Sequence[Row], taken: abc.Sequence[RowResult]
) -> None:
    """Renew the proposals of the sequences of `rows` on every rank. Rank `drawer` makes them.

    `taken`: result of each row in this step.
    """
    wanted = proposal_requests(rows, taken)
    if not wanted:
        return
    numbers: list[float] | None = None
    if team.rank == drawer:
        proposed, times = proposer.propose(wanted)
        numbers = [*times]
        for each in proposed:
            numbers += [len(each.tokens), each.forced, *each.tokens]
            numbers += [0.0] * (PROPOSED_MAX - len(each.tokens))
    spent_us, draft_us, *received = team.tell(drawer, numbers, 2 + PROPOSAL_NUMBERS * len(wanted))
    for index, request in enumerate(wanted):
        part = received[PROPOSAL_NUMBERS * index : PROPOSAL_NUMBERS * (index + 1)]
        count, forced, *tokens = map(int, part)
        proposal = request.proposal
        proposal.tokens, proposal.forced = tuple(tokens[:count]), forced
        proposal.spent_us, proposal.draft_us = int(spent_us), int(draft_us)


def add_page_sums(team: Team, whole: KvLayout, sums: abc.Sequence[PageSum]) -> None:
    """Add up what each rank has summed, a KV head that several ranks hold counted once."""
    if not sums:
        return
    heads = whole.heads
    mine = set(heads if team.topology.tensor == 1 else _counted(team, whole))
    parts = [each.here.get(head, 0) if head in mine else 0 for each in sums for head in heads]
    totals = iter(team.total(parts))
    for each in sums:
        each.everywhere = {head: next(totals) for head in heads}


def _counted(team: Team, whole: KvLayout) -> abc.Iterator[GroupHead]:
    """The KV heads of which this rank is the first tensor rank of its stage."""
    ranks = range(team.rank - team.topology.coordinates(team.rank).tensor, team.rank)
    before = {head for rank in ranks for head in rank_layout(whole, team.topology, rank).heads}
    held = rank_layout(whole, team.topology, team.rank).heads
    return (head for head in held if head not in before)


def _top_of(row: Row, vocabulary: int) -> int:
    return min(row.sequence.request.prompt_logprobs or 0, vocabulary)


def _score(words: abc.Sequence[float]) -> Score:
    logprob, rank, *more = words
    return Score(logprob, int(rank), tuple(zip(map(int, more[::2]), more[1::2], strict=True)))


def _words(drawn: DrawResult, count: int | None) -> list[float]:
    if isinstance(drawn, LogitsNotFinite | GrammarUnsatisfied):
        return [NONE[type(drawn)]] * _length(count)
    if drawn.logprob is None:
        return [float(drawn.id)]
    return [float(drawn.id), drawn.logprob, *(each for pair in drawn.top for each in pair)]


def _draws(told: abc.Iterator[float], count: int | None) -> abc.Iterator[DrawResult]:
    """One after the other: whoever takes them knows which were made."""
    while True:
        yield _token(told, count)


def _token(told: abc.Iterator[float], count: int | None) -> DrawResult:
    chosen, *more = [next(told) for _ in range(_length(count))]
    for why, code in NONE.items():
        if chosen == code:
            return why()
    if count is None:
        return Token(int(chosen))
    likeliest = zip(map(int, more[1::2]), more[2::2], strict=True)
    return Token(int(chosen), more[0], tuple(likeliest))


def _length(count: int | None) -> int:
    return 1 if count is None else 2 + 2 * count
