"""Broadcast of results that only the sampling rank has: sampled tokens, prompt scores and proposals.

It also adds up the page checksums of all ranks. Tokens are sent as numbers. Their count follows from the
step's rows, so that all ranks know it. A sampled token is its id, or NONE, then its log-probabilities if
requested. Places of tokens that were not sampled hold zeros. A double holds ids and float32 logarithms
exactly.
"""

from collections import abc
from itertools import accumulate
from math import isnan
from typing import Final

import torch

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
from baton.inference.collectives import Collectives
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
"""Negative number that is sent to the other ranks in place of a token id, by the reason why no token could be
sampled."""
PROPOSAL_NUMBERS: Final = 2 + PROPOSED_MAX
"""Count of numbers that are sent for one proposal: token count, forced count, then the draft tokens."""


def draw_tokens(
    rank_group: Collectives,
    drawer: int,
    logits: torch.Tensor | None,
    rows: abc.Sequence[Row],
    vocabulary: int,
) -> list[RowResult]:
    """Sample the next tokens of `rows` on one rank, and return each row's result, the same on every rank.

    All of `rows` sample. `drawer`: the rank that samples. `logits`: on that rank, [N, vocabulary] with one
    line for each row and each of its drafts.
    """
    if rank_group.topology.ranks == 1 and logits is not None:
        return [take(row.drafts, drawn) for row, drawn in zip(rows, sample_rows(logits, rows), strict=True)]
    if not rows:
        return []
    counts = [row.sequence.request.sampling.tops(vocabulary) for row in rows]
    sizes = [_length(count) * (1 + len(row.drafts)) for row, count in zip(rows, counts, strict=True)]
    numbers: list[float] | None = None
    if rank_group.rank == drawer:
        if logits is None:
            raise AssertionError(f"rank {drawer} is to draw and has no logits")
        numbers = []
        for drawn, count, size in zip(sample_rows(logits, rows), counts, sizes, strict=True):
            own_numbers = [number for each in drawn for number in _numbers_of(each, count)]
            numbers += own_numbers + [0.0] * (size - len(own_numbers))
    received = rank_group.broadcast(drawer, numbers, sum(sizes))
    parts = [received[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [
        take(row.drafts, _draws(iter(part), count))
        for row, part, count in zip(rows, parts, counts, strict=True)
    ]


def broadcast_scores(
    rank_group: Collectives,
    drawer: int,
    logits: abc.Sequence[torch.Tensor],
    rows: abc.Sequence[Row],
    vocabulary: int,
) -> list[bool]:
    """Extend the prompt log-probabilities of `rows`, and return for each row whether its logits were finite.

    `logits`: [positions, vocabulary] of each row, on rank `drawer`.
    """
    counts = [_top_of(row, vocabulary) for row in rows]
    sizes = [len(row.scored) * (2 + 2 * count) for row, count in zip(rows, counts, strict=True)]
    numbers: list[float] | None = None
    if rank_group.rank == drawer:
        numbers = [
            number
            for row, part, count in zip(rows, logits, counts, strict=True)
            for number in score(part, row.sequence.tokens(row.scored.start + 1, row.scored.stop + 1), count)
        ]
    received = rank_group.broadcast(drawer, numbers, sum(sizes))
    finite = []
    for row, count, size, end in zip(rows, counts, sizes, accumulate(sizes), strict=True):
        new = [
            _score(received[begin : begin + 2 + 2 * count]) for begin in range(end - size, end, 2 + 2 * count)
        ]
        finite.append(not any(isnan(each.logprob) for each in new))
        if row.sequence.scores is not None:
            row.sequence.scores.values += new
    return finite


def broadcast_proposals(
    rank_group: Collectives,
    drawer: int,
    proposer: Proposer,
    rows: abc.Sequence[Row],
    taken: abc.Sequence[RowResult],
) -> None:
    """Renew the draft tokens of the sequences of `rows` on every rank. Rank `drawer` makes them.

    `taken`: result of each row in this step.
    """
    wanted = proposal_requests(rows, taken)
    if not wanted:
        return
    numbers: list[float] | None = None
    if rank_group.rank == drawer:
        proposed, times = proposer.propose(wanted)
        numbers = [*times]
        for each in proposed:
            numbers += [len(each.tokens), each.forced, *each.tokens]
            numbers += [0.0] * (PROPOSED_MAX - len(each.tokens))
    spent_us, draft_us, *received = rank_group.broadcast(drawer, numbers, 2 + PROPOSAL_NUMBERS * len(wanted))
    for index, request in enumerate(wanted):
        part = received[PROPOSAL_NUMBERS * index : PROPOSAL_NUMBERS * (index + 1)]
        count, forced, *tokens = map(int, part)
        proposal = request.proposal
        proposal.tokens, proposal.forced = tuple(tokens[:count]), forced
        proposal.spent_us, proposal.draft_us = int(spent_us), int(draft_us)


def add_page_sums(rank_group: Collectives, whole: KvLayout, sums: abc.Sequence[PageSum]) -> None:
    """Add up the page checksums of all ranks, and store the result in each of `sums`.

    A KV head that several ranks hold counts once. `whole`: layout of the pages over all ranks.
    """
    if not sums:
        return
    heads = whole.heads
    own_numbers = set(heads if rank_group.topology.tensor == 1 else _counted(rank_group, whole))
    parts = [each.here.get(head, 0) if head in own_numbers else 0 for each in sums for head in heads]
    totals = iter(rank_group.sum_integers(parts))
    for each in sums:
        each.everywhere = {head: next(totals) for head in heads}


def _counted(rank_group: Collectives, whole: KvLayout) -> abc.Iterator[GroupHead]:
    """Yield the KV heads whose checksums this rank adds to the sum over all ranks, as (KV group index, head
    id).

    If several ranks hold a head, only the first of them adds its checksum.
    """
    ranks = range(rank_group.rank - rank_group.topology.coordinates(rank_group.rank).tensor, rank_group.rank)
    before = {head for rank in ranks for head in rank_layout(whole, rank_group.topology, rank).heads}
    own_heads = rank_layout(whole, rank_group.topology, rank_group.rank).heads
    return (head for head in own_heads if head not in before)


def _top_of(row: Row, vocabulary: int) -> int:
    return min(row.sequence.request.prompt_logprobs or 0, vocabulary)


def _score(numbers: abc.Sequence[float]) -> Score:
    logprob, rank, *more = numbers
    return Score(logprob, int(rank), tuple(zip(map(int, more[::2]), more[1::2], strict=True)))


def _numbers_of(drawn: DrawResult, count: int | None) -> list[float]:
    if isinstance(drawn, LogitsNotFinite | GrammarUnsatisfied):
        return [NONE[type(drawn)]] * _length(count)
    if drawn.logprob is None:
        return [float(drawn.id)]
    return [float(drawn.id), drawn.logprob, *(each for pair in drawn.top for each in pair)]


def _draws(received: abc.Iterator[float], count: int | None) -> abc.Iterator[DrawResult]:
    """Yield one sampling result after the other, decoded from the numbers `received`. The caller takes as
    many as were sent.

    `count`: number of log-probabilities sent with each token, or None.
    """
    while True:
        yield _token(received, count)


def _token(received: abc.Iterator[float], count: int | None) -> DrawResult:
    chosen, *more = [next(received) for _ in range(_length(count))]
    for why, code in NONE.items():
        if chosen == code:
            return why()
    if count is None:
        return Token(int(chosen))
    likeliest = zip(map(int, more[1::2]), more[2::2], strict=True)
    return Token(int(chosen), more[0], tuple(likeliest))


def _length(count: int | None) -> int:
    return 1 if count is None else 2 + 2 * count
