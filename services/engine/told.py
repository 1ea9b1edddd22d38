"""How does every rank of a worker come by what some of them know: the tokens drawn, the sums of pages?

Tokens go as numbers whose count follows from the step's rows, so that all ranks know it beforehand: whether
the draw came about, then for each sequence its id and, where they are asked for, log-probabilities. A double
holds ids and single-precision logarithms exactly.
"""

from collections import abc

import torch

from services.engine.rows import PageSum, Sequence
from services.engine.sampler import NotANumber, sample
from services.engine.team import Team
from services.pages.layout import KvLayout
from services.pages.topology import rank_layout
from services.rooms.request import Token

DRAWN = 0.0
NOT_NUMBERS = 1.0


def draw(
    team: Team, drawer: int, logits: torch.Tensor | None, sequences: abc.Sequence[Sequence], vocabulary: int
) -> list[Token]:
    """One token for each of `sequences`, the same on every rank. `logits`: [sequences, vocabulary] on rank
    `drawer`. Raises NotANumber, on all ranks, when it computed no numbers."""
    if team.topology.ranks == 1 and logits is not None:
        return sample(logits, sequences)
    if not sequences:
        return []
    counts = [_tops(sequence, vocabulary) for sequence in sequences]
    words: list[float] | None = None
    if team.rank == drawer:
        if logits is None:
            raise AssertionError(f"rank {drawer} is to draw and has no logits")
        words = _words(logits, sequences, counts)
    told = iter(team.tell(drawer, words, 1 + sum(map(_length, counts))))
    if next(told) != DRAWN:
        raise NotANumber("the model computed logits that are not numbers")
    return [_token(told, count) for count in counts]


def tell_sums(team: Team, whole: KvLayout, sums: abc.Sequence[PageSum]) -> None:
    """Add up what each rank has summed, a KV head that several ranks hold counted once."""
    if not sums:
        return
    heads = whole.kv_heads
    mine = set(heads if team.topology.tensor == 1 else _counted(team, whole))
    parts = [each.here.get(head, 0) if head in mine else 0 for each in sums for head in heads]
    totals = iter(team.total(parts))
    for each in sums:
        each.everywhere = {head: next(totals) for head in heads}


def _counted(team: Team, whole: KvLayout) -> abc.Iterator[int]:
    """The KV heads of which this rank is the first tensor rank of its stage."""
    ranks = range(team.rank - team.topology.place(team.rank).tensor, team.rank)
    before = {head for rank in ranks for head in rank_layout(whole, team.topology, rank).kv_heads}
    held = rank_layout(whole, team.topology, team.rank).kv_heads
    return (head for head in held if head not in before)


def _words(logits: torch.Tensor, sequences: abc.Sequence[Sequence], counts: list[int | None]) -> list[float]:
    try:
        tokens = sample(logits, sequences)
    except NotANumber:
        return [NOT_NUMBERS] + [0.0] * sum(map(_length, counts))
    words = [DRAWN]
    for token in tokens:
        words.append(float(token.id))
        if token.logprob is not None:
            words.append(token.logprob)
            words.extend(each for pair in token.top for each in pair)
    return words


def _token(told: abc.Iterator[float], count: int | None) -> Token:
    chosen = int(next(told))
    if count is None:
        return Token(chosen)
    return Token(chosen, next(told), tuple((int(next(told)), next(told)) for _ in range(count)))


def _tops(sequence: Sequence, vocabulary: int) -> int | None:
    """How many of the likeliest tokens are told; None where no log-probability is."""
    asked = sequence.request.sampling.top_logprobs
    return None if asked is None else min(asked, vocabulary)


def _length(count: int | None) -> int:
    return 1 if count is None else 2 + 2 * count
