"""Sampling of the next token from logits, reproducible by the request's seed.

Sampling is a race (the Gumbel-max trick). Every token has a waiting time that depends on the seed, the output
position and its id alone. The likelier a token is, the shorter is its wait. The token with the shortest wait
is chosen, whatever else is in the batch. Logits that differ by a rounding, as in another attempt, change the
choice only if two tokens tie within that rounding. An inverted cumulative distribution would not do: each
share shifts the borders of all tokens behind it. In float32 one token of 140 at temperature 1 differed when a
chunk was computed instead of single tokens.

Of equally likely tokens the lower id comes first, wherever tokens are ordered. So `top_k` 1 and a vanishing
`top_p` are greedy, and a later attempt samples the same on another device (`fresh-attempt`).
"""

import math
from collections import abc
from typing import Final

import torch

from baton.engine_interface import DrawResult, GrammarUnsatisfied, LogitsNotFinite, Sequence
from baton.grammars.grammar_state import GrammarLost
from baton.rooms.request import Token
from baton.sampling.grammar_masks import apply_masks, grammar_masks
from baton.sampling.penalties import adjust, changes_scores
from baton.sampling.random_numbers import numbers

PART_MIN, PART_MAX = 16, 512
"""Least and greatest size, in tokens, of the parts in which a CPU searches the likeliest token.

PART_MAX is a power of two, so that parts divide the vocabulary.
"""
NUCLEUS_FIRST_LOOK: Final = 256
"""Number of likeliest tokens that are sorted first for `top_p`. All tokens are sorted only if these fall
short."""

RACES: Final = 8
"""Number of rows of scores whose tokens are chosen together. So few rows stay in a core's cache."""
UNITS: Final = 2**52
"""Number of whole units that stand for a probability of 1. Sums of units are exact in double precision."""


def sample(logits: torch.Tensor, sequences: abc.Sequence[Sequence]) -> list[DrawResult]:
    """Sample one token for each of `sequences` from `logits` [sequences, vocabulary]. Return one result for
    each, in order.

    A result is LogitsNotFinite or GrammarUnsatisfied if no token can be sampled.
    """
    if not sequences:
        return []
    constrained = [row for row, sequence in enumerate(sequences) if sequence.request.grammar is not None]
    # Before logits are read, so that a GPU that still computes them is not waited for.
    masks = grammar_masks([sequences[row] for row in constrained])
    edited = [row for row, sequence in enumerate(sequences) if changes_scores(sequence)]
    drawn = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.temperature > 0]
    with_logprobs = [
        row for row, each in enumerate(sequences) if each.request.sampling.top_logprobs is not None
    ]
    raw = scores = logits.float() if constrained or edited or drawn or with_logprobs else logits
    if constrained:
        raw = scores = apply_masks(raw, constrained, masks)
    if edited:
        scores = scores.clone()
        for row in edited:
            adjust(scores[row], sequences[row])
    best, chosen = _likeliest(scores)
    if drawn:
        chosen[drawn] = _draw(scores[drawn], [sequences[row] for row in drawn])
    lost = ~torch.isfinite(best)
    ids: list[int] = chosen.masked_fill(lost, 0).tolist()
    tokens: list[DrawResult] = [Token(each) for each in ids]
    if with_logprobs:
        for row, token in zip(
            with_logprobs, _with_logprobs(raw[with_logprobs], ids, with_logprobs, sequences), strict=True
        ):
            tokens[row] = token
    for row in lost.nonzero()[:, 0].tolist():
        tokens[row] = LogitsNotFinite()
    for row, mask in zip(constrained, masks, strict=True):
        if isinstance(mask, GrammarLost):
            tokens[row] = GrammarUnsatisfied(str(mask))
    return tokens


def _likeliest(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest score of each row, and the lowest token id that has this score. NaN counts as the
    largest number."""
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
    """Return a token id sampled from each row of `scores` [rows, vocabulary].

    Applies temperature, top_k, top_p, then min_p.
    """
    samplings = [sequence.request.sampling for sequence in sequences]
    vocabulary = scores.shape[1]
    column = scores.new_tensor([[each.temperature, each.min_p] for each in samplings])
    temperature, min_p = column[:, :1], column[:, 1:]
    # The likeliest score becomes 0 first, so that no temperature overflows.
    scores = scores - scores.max(dim=-1, keepdim=True).values
    top_k = [min(each.top_k, vocabulary) if each.top_k > 0 else vocabulary for each in samplings]
    top_p = [each.top_p for each in samplings]
    if min(top_k) < vocabulary or min(top_p) < 1.0:
        scores = _cut(scores, temperature, top_k, top_p)
    scores = scores / temperature
    if any(each.min_p > 0.0 for each in samplings):
        scores = scores.masked_fill(scores.exp() < min_p, float("-inf"))
    places = [(each.request.sampling.seed, len(each.output)) for each in sequences]
    parts = range(0, len(places), RACES)
    return torch.cat([_race(scores[part : part + RACES], places[part : part + RACES]) for part in parts])


def _race(scores: torch.Tensor, places: abc.Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return for each row the token id with the shortest random waiting time.

    `scores`: [rows, vocabulary], with temperature applied. `places`: pairs of seed and output position.
    An exponential waiting time has the rate e**score. Its logarithm is compared, so that no weight is too
    small.
    """
    waits = numbers(places, scores.shape[1], scores.device).neg_().log1p_().neg_().log_()
    return torch.sub(scores, waits, out=waits).argmax(dim=-1)


def _units(shares: torch.Tensor, of_one: int) -> torch.Tensor:
    """Return probabilities as whole numbers of units, `of_one` for a probability of 1.

    Their sums are the same in any order on any device.
    """
    return shares.double().mul_(of_one).floor_()


def _cut(
    scores: torch.Tensor, temperature: torch.Tensor, top_k: list[int], top_p: list[float]
) -> torch.Tensor:
    """Return `scores` with -inf for tokens that `top_k` or `top_p` exclude.

    The largest score of each row is 0. Of the row's `top_k` likeliest tokens, the fewest stay that together
    reach `top_p`.
    """
    vocabulary = scores.shape[1]
    most = torch.tensor([[each] for each in top_k], device=scores.device)
    width = max((each for each in top_k if each < vocabulary), default=0)
    wide = [row for row, each in enumerate(top_p) if each < 1.0 and top_k[row] == vocabulary]
    if wide:
        width = max(width, min(NUCLEUS_FIRST_LOOK, vocabulary))
    largest = scores.topk(width).values
    counts = most
    if min(top_p) < 1.0:
        of_one = UNITS >> vocabulary.bit_length()  # each weighs 1 at most, and no sum is beyond UNITS
        sums, shares = _sums(largest, most, temperature, of_one)
        total = sums[:, -1:].clone()
        if wide:
            total[wide] = _units((scores[wide] / temperature[wide]).exp_(), of_one).sum(dim=-1, keepdim=True)
        needed = scores.new_tensor([[each] for each in top_p], dtype=torch.float64) * total
        if wide and width < vocabulary and bool((sums[wide, -1:] < needed[wide]).any()):
            largest = scores.topk(vocabulary).values
            sums, shares = _sums(largest, most, temperature, of_one)
        fewest = (sums - shares < needed).sum(dim=-1, keepdim=True).clamp(min=1)
        uncut = torch.tensor([[each >= 1.0] for each in top_p], device=scores.device)
        counts = torch.where(uncut, most, torch.minimum(most, fewest))
    is_kept = _first(scores, largest, counts, vocabulary)
    return scores.masked_fill(~is_kept, float("-inf"))


def _sums(
    largest: torch.Tensor, most: torch.Tensor, temperature: torch.Tensor, of_one: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cumulative probabilities of each row's likeliest tokens, and the probability of each, in
    units.

    `largest`: scores of these tokens in descending order. `most`: number of tokens of each row that count.
    The others get 0. `of_one`: units of a probability of 1.
    """
    shares = _units(torch.exp(largest / temperature), of_one)
    shares.masked_fill_(torch.arange(largest.shape[1], device=largest.device) >= most, 0.0)
    return shares.cumsum(dim=-1), shares


def _first(
    scores: torch.Tensor, largest: torch.Tensor, counts: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """Return a boolean mask [rows, vocabulary] of the `counts` [rows, 1] largest scores in each row. Of equal
    scores the lower ids come first.

    `largest`: each row's largest scores in descending order, as many as any row's count if that is less than
    `vocabulary`. Devices sort equal scores in any order, but the smallest score that stays is the same.
    """
    floor = largest.gather(1, counts.clamp(max=largest.shape[1]) - 1)
    floor = floor.masked_fill(counts == vocabulary, float("-inf"))
    is_kept = scores >= floor
    if bool((is_kept.sum(dim=-1, keepdim=True) > counts).any()):
        above, level = scores > floor, scores == floor
        room = counts - above.sum(dim=-1, keepdim=True)
        is_kept = above | (level & (level.cumsum(dim=-1) <= room))
    return is_kept


def _with_logprobs(
    raw: torch.Tensor, ids: list[int], rows: list[int], sequences: abc.Sequence[Sequence]
) -> abc.Iterator[Token]:
    """Yield the sampled tokens of `rows` with their log-probabilities and those of the likeliest tokens.

    `raw`: logits before penalties. `ids`: sampled token ids of all rows.
    """
    logprobs = torch.log_softmax(raw, dim=-1)
    counts = [sequences[row].request.sampling.top_logprobs or 0 for row in rows]
    own = logprobs.gather(1, torch.tensor([[ids[row]] for row in rows], device=raw.device)).tolist()
    likeliest = likeliest_ids(raw, min(max(counts), raw.shape[1]))
    values, places = logprobs.gather(1, likeliest).tolist(), likeliest.tolist()
    for each, row in enumerate(rows):
        top = zip(places[each][: counts[each]], values[each][: counts[each]], strict=True)
        given = sequences[row].request.sampling.logprob_token_ids
        requested = zip(given, logprobs[each, list(given)].tolist(), strict=True) if given else ()
        yield Token(ids[row], own[each][0], (*top, *requested))


def likeliest_ids(raw: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids [rows, count] of each row's likeliest tokens, in descending order of their scores.

    Arbitrary for a row with NaN.
    """
    if count == 0:
        return torch.empty(len(raw), 0, dtype=torch.int64, device=raw.device)
    if count == 1:
        return _likeliest(raw)[1][:, None]
    if count >= raw.shape[1]:
        return _from_above(raw, _likeliest_of_equals(raw, count))
    largest, found = raw.topk(count + 1)
    places = found[:, :count].sort(dim=-1).values
    # Where more scores are equal to the least of those, a device may have found any of them.
    tied = ~(largest[:, count - 1] > largest[:, count])
    if bool(tied.any()):
        places[tied] = _likeliest_of_equals(raw[tied], count)
    return _from_above(raw, places)


def _from_above(raw: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return each row's token ids `places` in descending order of their scores `raw`. Of equal scores the
    lower id comes first.

    `places`: some token ids of each row, in ascending order.
    """
    order = raw.gather(1, places).argsort(dim=-1, descending=True, stable=True)
    return places.gather(1, order)


def _likeliest_of_equals(raw: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the `count` largest scores of each row in ascending order.

    Of equal scores the lower ids are taken.
    """
    largest = raw.topk(count).values
    if bool(largest.isnan().any()):
        raw = raw.masked_fill(raw.isnan(), float("-inf"))
        largest = raw.topk(count).values
    counts = torch.full((len(raw), 1), count, device=raw.device)
    is_kept = _first(raw, largest, counts, raw.shape[1] + 1)
    return is_kept.nonzero()[:, 1].view(len(raw), count)
