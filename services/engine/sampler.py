"""Which token comes next, given the logits?

A draw inverts the cumulative distribution, in the order of token ids, at a number that belongs to (seed,
output position) alone: what else is in the batch does not change it.
"""

import math
from collections import abc

import torch

from services.engine.draws import uniform
from services.engine.penalties import adjust, changes_scores
from services.engine.rows import Sequence
from services.rooms.request import Token

PART_MIN, PART_MAX = 16, 512
"""Tokens of which the likeliest is looked for together. A power of two, to divide the vocabulary."""
NUCLEUS_FIRST_LOOK = 256
"""How many of the likeliest tokens are sorted before all are, where only `top_p` cuts."""


class NotANumber(ArithmeticError):
    """Of one sequence the largest of the logits is NaN or infinite: no token can be drawn."""

    def __init__(self) -> None:
        super().__init__("the model computed logits that are not numbers")


Drawn = Token | NotANumber
"""Of one sequence."""


def sample(logits: torch.Tensor, sequences: abc.Sequence[Sequence]) -> list[Drawn]:
    """Draw one token for each of `sequences` from `logits` [sequences, vocabulary]."""
    if not sequences:
        return []
    edited = [row for row, sequence in enumerate(sequences) if changes_scores(sequence)]
    drawn = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.temperature > 0]
    told = [row for row, each in enumerate(sequences) if each.request.sampling.top_logprobs is not None]
    raw = scores = logits.float() if edited or drawn or told else logits
    if edited:
        scores = scores.clone()
        for row in edited:
            adjust(scores[row], sequences[row])
    best, chosen = _likeliest(scores)
    if drawn:
        chosen[drawn] = _draw(scores[drawn], [sequences[row] for row in drawn])
    lost = ~torch.isfinite(best)
    ids: list[int] = chosen.masked_fill(lost, 0).tolist()
    tokens: list[Drawn] = [Token(each) for each in ids]
    if told:
        for row, token in zip(told, _tell(raw[told], ids, told, sequences), strict=True):
            tokens[row] = token
    for row in lost.nonzero()[:, 0].tolist():
        tokens[row] = NotANumber()
    return tokens


def _likeliest(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest score, and the first place where it stands. NaN is the largest."""
    rows, vocabulary = scores.shape
    width = math.gcd(vocabulary, PART_MAX)
    if width < PART_MIN or scores.device.type != "cpu":
        best, chosen = scores.max(dim=-1)
        return best, chosen
    # A CPU finds the largest of a part many times faster than the place where it stands.
    parts = scores.view(rows, -1, width)
    best, part = parts.amax(dim=-1).max(dim=-1)
    within = parts[torch.arange(rows), part].argmax(dim=-1)
    return best, part * width + within


def _draw(scores: torch.Tensor, sequences: abc.Sequence[Sequence]) -> torch.Tensor:
    """One id for each row of `scores` [rows, vocabulary]: temperature, top_k, top_p, then min_p."""
    asked = [sequence.request.sampling for sequence in sequences]
    vocabulary = scores.shape[1]
    column = scores.new_tensor([[each.temperature, each.top_p, each.min_p] for each in asked])
    temperature, top_p, min_p = column[:, :1], column[:, 1:2], column[:, 2:]
    # The likeliest score becomes 0 first, so that no temperature overflows.
    scores = (scores - scores.max(dim=-1, keepdim=True).values) / temperature
    top_k = [min(each.top_k, vocabulary) if each.top_k > 0 else vocabulary for each in asked]
    if min(top_k) < vocabulary:
        scores = scores.masked_fill(scores < _kth_largest(scores, top_k), float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    if any(each.top_p < 1.0 for each in asked):
        weights = weights.masked_fill(weights < _nucleus_floor(weights, top_p), 0.0)
    if any(each.min_p > 0.0 for each in asked):
        weights = weights.masked_fill(weights < min_p * weights.max(dim=-1, keepdim=True).values, 0.0)
    steps = weights.double().cumsum(dim=-1)
    points = [[uniform(each.request.sampling.seed, len(each.output))] for each in sequences]
    target = torch.tensor(points, dtype=torch.float64, device=scores.device) * steps[:, -1:]
    return torch.searchsorted(steps, target, right=True)[:, 0]


def _kth_largest(scores: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """[rows, 1]: each row's k-th largest score; -inf where k is the vocabulary (nothing is cut)."""
    vocabulary = scores.shape[1]
    width = max(k for k in top_k if k < vocabulary)
    largest = scores.topk(width).values
    places = torch.tensor([[min(k, width) - 1] for k in top_k], device=scores.device)
    floors = largest.gather(1, places)
    uncut = torch.tensor([[k == vocabulary] for k in top_k], device=scores.device)
    return floors.masked_fill(uncut, float("-inf"))


def _nucleus_floor(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: the least weight among the fewest likeliest tokens that together reach `top_p`."""
    vocabulary = weights.shape[1]
    for width in (min(NUCLEUS_FIRST_LOOK, vocabulary), vocabulary):
        largest = weights.topk(width).values
        sums = largest.cumsum(dim=-1)
        if width == vocabulary or bool((sums[:, -1:] >= top_p).all()):
            break
    kept = (sums - largest < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    floors = largest.gather(1, kept - 1)
    return floors.masked_fill(top_p >= 1.0, 0.0)


def _tell(
    raw: torch.Tensor, ids: list[int], rows: list[int], sequences: abc.Sequence[Sequence]
) -> abc.Iterator[Token]:
    """The chosen tokens of `rows` with their log-probabilities. `raw`: untouched logits."""
    logprobs = torch.log_softmax(raw, dim=-1)
    counts = [sequences[row].request.sampling.top_logprobs or 0 for row in rows]
    own = logprobs.gather(1, torch.tensor([[ids[row]] for row in rows], device=raw.device)).tolist()
    likeliest = logprobs.topk(min(max(counts), raw.shape[1]))
    values, places = likeliest.values.tolist(), likeliest.indices.tolist()
    for each, row in enumerate(rows):
        top = zip(places[each][: counts[each]], values[each][: counts[each]], strict=True)
        yield Token(ids[row], own[each][0], tuple(top))
