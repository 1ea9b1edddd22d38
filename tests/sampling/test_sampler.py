"""Tests that draws follow each option, and do not depend on the rest of the batch.

Distributions are compared with the reference library's own processors. Seeds are fixed: a draw is a function
of its seed, so these tests have one outcome.
"""

import math
from collections import Counter
from collections.abc import Sequence as Sequenced
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.engine_interface import DrawResult, LogitsNotFinite, Sequence
from baton.rooms.request import Request, Sampling, Token
from baton.sampling.random_numbers import numbers
from baton.sampling.sampler import likeliest_ids, sample

VOCABULARY = 40
DRAWS = 20_000
GREEDY = Sampling(temperature=0.0)


def logits(rows: int = 1, vocabulary: int = VOCABULARY, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def sequence(
    sampling: Sampling, prompt: Sequenced[int] = (1,), output: Sequenced[int] = (), **more: Any
) -> Sequence:
    return Sequence(Request("mine", tuple(prompt), 1000, sampling=sampling, **more), list(output))


def ids(drawn: Sequenced[DrawResult]) -> list[int | None]:
    """Return the drawn ids, with None where there was no token to draw."""
    return [each.id if isinstance(each, Token) else None for each in drawn]


def frequencies(scores: torch.Tensor, sampling: Sampling) -> Counter[int]:
    """Return the frequency of each token over many seeds."""
    asked = [sequence(replace(sampling, seed=seed)) for seed in range(DRAWS)]
    return Counter(id_ for id_ in ids(sample(scores.expand(DRAWS, -1), asked)) if id_ is not None)


def assert_drawn_from(found: Counter[int], probabilities: torch.Tensor) -> None:
    """Check by Pearson's statistic that the draws fit the probabilities within six standard deviations, and
    that no impossible token was drawn."""
    possible = {token for token in range(len(probabilities)) if probabilities[token] > 0}
    assert set(found) <= possible
    likely = [token for token in possible if probabilities[token] * DRAWS >= 5]
    expected = {token: float(probabilities[token]) * DRAWS for token in likely}
    statistic = sum((found[token] - expected[token]) ** 2 / expected[token] for token in likely)
    assert statistic < len(likely) + 6 * math.sqrt(2 * len(likely))


@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        (Sampling(), []),
        (Sampling(temperature=0.4), [TemperatureLogitsWarper(0.4)]),
        (Sampling(temperature=1.9), [TemperatureLogitsWarper(1.9)]),
        (Sampling(top_k=1), [TopKLogitsWarper(1)]),
        (Sampling(top_k=7), [TopKLogitsWarper(7)]),
        (Sampling(top_k=10**6), []),
        (Sampling(top_p=0.7), [TopPLogitsWarper(0.7)]),
        (Sampling(top_p=0.01), [TopPLogitsWarper(0.01)]),
        (Sampling(min_p=0.2), [MinPLogitsWarper(0.2)]),
        (
            Sampling(temperature=1.3, top_k=12, top_p=0.8, min_p=0.1),
            [
                TemperatureLogitsWarper(1.3),
                TopKLogitsWarper(12),
                TopPLogitsWarper(0.8),
                MinPLogitsWarper(0.1),
            ],
        ),
    ],
    ids=lambda each: str(each).removeprefix("Sampling")[:48] if isinstance(each, Sampling) else "",
)
def test_distribution_is_the_reference_librarys(sampling: Sampling, processors: list[Any]) -> None:
    scores = logits()
    expected = LogitsProcessorList(processors)(torch.tensor([[1]]), scores.clone()).softmax(dim=-1)[0]
    assert_drawn_from(frequencies(scores, sampling), expected)


def test_nucleus_of_a_flat_distribution_is_wider_than_the_first_look() -> None:
    """A larger vocabulary and nearly equal scores: the 256 likeliest do not reach top_p."""
    scores = logits(vocabulary=700) * 0.01
    expected = TopPLogitsWarper(0.5)(torch.tensor([[1]]), scores.clone()).softmax(dim=-1)[0]
    possible = set(expected.nonzero().flatten().tolist())
    assert len(possible) > 300
    found = set(frequencies(scores, Sampling(top_p=0.5)))
    assert found <= possible
    assert len(found) > 0.99 * len(possible)


def kept(row: Sequenced[float], asked: Sampling) -> list[int]:
    """Return the ids that may be drawn, computed in plain Python. Of equal scores, those of lower ids come
    first."""
    order = sorted(range(len(row)), key=lambda id_: (-row[id_], id_))[: asked.top_k or None]
    weights = [math.exp((row[id_] - row[order[0]]) / asked.temperature) for id_ in order]
    before, some = 0.0, []
    for id_, weight in zip(order, weights, strict=True):
        if before < asked.top_p * sum(weights) - 1e-9 and weight >= asked.min_p:
            some.append(id_)
        before += weight
    return sorted(some or order[:1])


@pytest.mark.parametrize(
    "asked",
    [
        Sampling(top_k=1),
        Sampling(top_k=1, temperature=2.0, min_p=0.5),
        Sampling(top_k=6),
        Sampling(top_k=39),
        Sampling(top_p=1e-9),
        Sampling(top_p=5e-324),
        Sampling(top_p=0.5),
        Sampling(top_p=0.9, temperature=0.3),
        Sampling(min_p=1.0),
        Sampling(top_k=5, top_p=0.6, min_p=0.1, temperature=1.7),
    ],
    ids=lambda each: str(each).removeprefix("Sampling")[:64],
)
@pytest.mark.parametrize("coarse", [1.0, 0.25, 100.0], ids="steps of {}".format)
def test_of_equal_tokens_those_of_the_lower_ids_are_kept_and_no_more_than_are_asked_for(
    coarse: float, asked: Sampling
) -> None:
    """In a narrow number format, several tokens are often equally likely."""
    scores = (logits(4) / coarse).round() * coarse
    seeds = 400
    for row in scores:
        each = [sequence(replace(asked, seed=seed)) for seed in range(seeds)]
        found = {id_ for id_ in ids(sample(row.expand(seeds, -1), each)) if id_ is not None}
        expected = kept(row.tolist(), asked)
        assert found <= set(expected)
        assert len(expected) > 12 or found == set(expected)


def test_one_likeliest_is_greedy_whatever_is_equal_and_whoever_is_beside() -> None:
    scores = logits(32, vocabulary=1024).to(torch.bfloat16).round()
    greedy = ids(sample(scores, [sequence(GREEDY)] * 32))
    assert sum(int((row == row.max()).sum()) for row in scores) > 40, "there are ties"
    for asked in (Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(top_k=1, top_p=1e-9, min_p=1.0)):
        beside = [replace(asked, seed=seed) if seed % 2 else Sampling(seed=seed) for seed in range(32)]
        drawn = ids(sample(scores, [sequence(each) for each in beside]))
        assert drawn[1::2] == greedy[1::2]


def test_of_equal_alternatives_those_of_the_lower_ids_are_told() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 3.0]])
    (token,) = sample(scores, [sequence(Sampling(temperature=0.0, top_logprobs=5))])
    assert isinstance(token, Token)
    assert [id_ for id_, _ in token.top] == [1, 3, 6, 2, 4]


def test_a_vanishing_temperature_is_greedy() -> None:
    scores = logits(50)
    asked = [sequence(Sampling(temperature=1e-38, seed=seed)) for seed in range(50)]
    assert ids(sample(scores, asked)) == scores.argmax(dim=-1).tolist()


def test_greedy() -> None:
    scores = logits(8)
    assert ids(sample(scores, [sequence(GREEDY)] * 8)) == scores.argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [37, 96, 1024])
def test_greedy_takes_the_first_of_the_likeliest(vocabulary: int, dtype: torch.dtype) -> None:
    """Large vocabularies are searched in parts, small ones at once."""
    scores = logits(8, vocabulary).round().to(dtype)
    first = [row.index(max(row)) for row in scores.tolist()]
    assert ids(sample(scores, [sequence(GREEDY)] * 8)) == first
    scores[5, -1] = float("nan")
    drawn = ids(sample(scores, [sequence(GREEDY)] * 8))
    assert drawn == [*first[:5], None, *first[6:]]


def test_a_draw_depends_on_its_own_request_alone() -> None:
    """Alone, in a batch of other kinds, and on a later attempt: the same tokens."""
    scores = logits(6)
    asked = [
        sequence(Sampling(seed=5)),
        sequence(GREEDY),
        sequence(Sampling(seed=5, top_k=3), output=[4]),
        sequence(Sampling(seed=6, top_p=0.5, temperature=2.0), output=[4, 9]),
        sequence(Sampling(seed=7, min_p=0.3, repetition_penalty=1.5)),
        sequence(Sampling(seed=8, top_logprobs=3, frequency_penalty=0.5), output=[2, 2]),
    ]
    together = ids(sample(scores, asked))
    alone = [ids(sample(scores[row : row + 1], [each]))[0] for row, each in enumerate(asked)]
    backwards = ids(sample(scores.flip(0), asked[::-1]))[::-1]
    assert together == alone == backwards


def test_seed_and_position_both_matter() -> None:
    scores = logits() * 0.1
    by_seed = {ids(sample(scores, [sequence(Sampling(seed=seed))]))[0] for seed in range(64)}
    by_position = {ids(sample(scores, [sequence(Sampling(), output=[1] * place)]))[0] for place in range(64)}
    assert len(by_seed) > 20
    assert len(by_position) > 20


def best(scores: torch.Tensor, sampling: Sampling, **more: Any) -> int:
    (chosen,) = ids(sample(scores, [sequence(sampling, **more)]))
    assert chosen is not None
    return chosen


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_is_the_reference_librarys(penalty: float) -> None:
    """The penalty covers prompt and output, once for each token however often it occurred."""
    for seed in range(40):
        scores, prompt, output = logits(seed=seed), [1, 2, 3, 1], [7, 7, int(logits(seed=seed).argmax())]
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), scores.clone())
        asked = Sampling(temperature=0.0, repetition_penalty=penalty)
        assert best(scores, asked, prompt=prompt, output=output) == int(expected.argmax())


def test_presence_and_frequency_penalties_count_output_only() -> None:
    for seed in range(40):
        scores = logits(seed=seed)
        order = scores[0].argsort(descending=True).tolist()
        prompt, output = order[:2], [order[0], order[1], order[1], order[2]]
        counts = Counter(output)
        expected = [
            value - counts[token] * 0.7 - (0.4 if counts[token] else 0.0)
            for token, value in enumerate(scores[0].tolist())
        ]
        asked = Sampling(temperature=0.0, presence_penalty=0.4, frequency_penalty=0.7)
        assert best(scores, asked, prompt=prompt, output=output) == expected.index(max(expected))
        assert best(scores, asked, prompt=prompt) == order[0]


def test_logit_bias_brings_and_bans() -> None:
    scores = logits()
    first, second, *_, last = scores[0].argsort(descending=True).tolist()
    assert best(scores, Sampling(temperature=0.0, logit_bias=((last, 100.0),))) == last
    assert best(scores, Sampling(temperature=0.0, logit_bias=((first, -100.0),))) == second
    assert best(scores, Sampling(temperature=0.0, logit_bias=((VOCABULARY + 5, 100.0),))) == first


def test_ending_ids_wait_for_min_tokens_whatever_the_bias() -> None:
    scores = logits()
    first, second, third, *_ = scores[0].argsort(descending=True).tolist()
    biased = Sampling(temperature=0.0, logit_bias=((first, 100.0),))
    ends = {"min_tokens": 3, "eos_token_ids": (first,), "stop_token_ids": (second, VOCABULARY + 1)}
    assert best(scores, biased, output=[1, 1], **ends) == third
    assert best(scores, biased, output=[1, 1, 1], **ends) == first
    assert best(scores, biased, output=[1, 1], ignore_eos=True, **ends) == first


def test_logprobs_are_the_models_own() -> None:
    """Penalties, biases and the temperature do not change them. The chosen token's logprob comes first."""
    scores = logits(3)
    expected = scores.double().log_softmax(dim=-1)
    bias = ((5, 50.0),)
    asked = [
        sequence(Sampling(temperature=0.0, logit_bias=bias, top_logprobs=4, repetition_penalty=2.0)),
        sequence(GREEDY),
        sequence(Sampling(temperature=0.3, top_logprobs=0)),
    ]
    first, second, third = (each for each in sample(scores, asked) if isinstance(each, Token))
    assert first.id == 5
    assert first.logprob == pytest.approx(expected[0, 5].item(), abs=1e-5)
    order = expected[0].argsort(descending=True)[:4].tolist()
    assert [token for token, _ in first.top] == order
    assert [logprob for _, logprob in first.top] == pytest.approx(expected[0, order].tolist(), abs=1e-5)
    assert all(above[1] >= below[1] for above, below in pairwise(first.top))
    assert (second.logprob, second.top) == (None, ())
    assert third.logprob == pytest.approx(expected[2, third.id].item(), abs=1e-5)
    assert third.top == ()


def test_the_given_logits_are_not_changed() -> None:
    scores = logits(2)
    before = scores.clone()
    busy = Sampling(top_k=3, top_p=0.5, presence_penalty=1.0, logit_bias=((1, 5.0),), top_logprobs=2)
    sample(scores, [sequence(busy, output=[1, 2]), sequence(GREEDY)])
    assert torch.equal(scores, before)


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(),
        Sampling(top_logprobs=3),
        Sampling(temperature=0.0, top_logprobs=0),
        Sampling(top_k=3, top_p=0.5, min_p=0.1, presence_penalty=1.0),
    ],
)
@pytest.mark.parametrize(
    ("number", "where"),
    [
        (math.nan, slice(4, 5)),
        (math.nan, slice(None)),
        (math.inf, slice(4, 5)),
        (math.inf, slice(None)),
        (-math.inf, slice(None)),
    ],
    ids=["one NaN", "all NaN", "one infinite", "all infinite", "nothing likely"],
)
def test_logits_that_are_not_numbers_are_their_own_sequences_trouble(
    sampling: Sampling, number: float, where: slice
) -> None:
    scores = logits(3)
    whole = sample(scores, [sequence(sampling)] * 3)
    scores[1, where] = number
    drawn = sample(scores, [sequence(sampling)] * 3)
    assert isinstance(drawn[1], LogitsNotFinite)
    assert [drawn[0], drawn[2]] == [whole[0], whole[2]]


def test_nobody_samples() -> None:
    assert sample(torch.empty(0, VOCABULARY), []) == []


@pytest.mark.parametrize("kind", ["small", "wide"])
def test_a_rounding_of_the_logits_changes_no_draw(kind: str) -> None:
    """A retried room computes in one chunk what was computed token by token. All float32 probabilities then
    differ in their last bits."""
    vocabulary, draws = (256, 4000) if kind == "small" else (8192, 1000)
    scores = logits(vocabulary=vocabulary) * 0.5
    off = torch.linspace(0, math.pi, vocabulary).sin() * 2e-5
    asked = [sequence(Sampling(seed=seed)) for seed in range(draws)]
    drawn, again = (ids(sample(each.expand(draws, -1), asked)) for each in (scores, scores + off))
    assert drawn == again
    assert len(set(drawn)) > 100


def draw(places: list[tuple[int, int]], vocabulary: int = 1) -> list[float]:
    told: list[float] = numbers(places, vocabulary, torch.device("cpu")).flatten().tolist()
    return told


@pytest.mark.parametrize("along", ["seeds", "positions", "ids"])
def test_numbers_are_even_over_seeds_positions_and_ids(along: str) -> None:
    """The random numbers are even in a hundred cells, and neighbouring pairs in a grid of ten by ten."""
    places = [(0, 0)] if along == "ids" else [(each, 0) for each in range(DRAWS)]
    places = [place[::-1] for place in places] if along == "positions" else places
    told = draw(places, DRAWS if along == "ids" else 1)
    assert min(told) > 0
    assert max(told) < 1
    even = torch.full((100,), 0.01)
    assert_drawn_from(Counter(int(number * 100) for number in told), even)
    assert_drawn_from(Counter(int(a * 10) * 10 + int(b * 10) for a, b in pairwise([*told, 0.5])), even)


@pytest.mark.parametrize("ids_apart", [1, 2, 1024])
def test_what_two_ids_get_does_not_hang_together(ids_apart: int) -> None:
    """Over many seeds, pairs of numbers are even in a grid of ten by ten."""
    told = numbers([(seed, 3) for seed in range(DRAWS)], ids_apart + 1, torch.device("cpu"))
    pairs = zip(told[:, 0].tolist(), told[:, ids_apart].tolist(), strict=True)
    cells = Counter(int(a * 10) * 10 + int(b * 10) for a, b in pairs)
    assert_drawn_from(cells, torch.full((100,), 0.01))


def test_numbers_are_not_shared_between_neighbouring_seeds() -> None:
    """Seed s at position i + 1 is not seed s + 1 at position i. Of 40,000 numbers of 32 bits no ten are equal
    by chance."""
    told = draw([(seed, place) for seed in range(200) for place in range(200)])
    assert len(set(told)) > 200 * 200 - 60


def test_the_least_number_makes_no_unlikely_token_win() -> None:
    """An id gets it once in 2**26: were it less than the middle of that, the id would come first as often,
    however unlikely its token is."""
    seed, token = 50, 47_372
    found = numbers([(seed, 0)], 50_000, torch.device("cpu"))[0]
    assert found.argmin() == token
    assert found[token] == found.min() == 2.0**-27


def test_numbers_stay_what_they_are() -> None:
    """Workers of different versions continue each other's sequences, so a change of these numbers breaks
    them."""
    found = numbers(list(GOLDEN), 50_000, torch.device("cpu"))[:, [0, 1, 49_999]].tolist()
    assert found == [pytest.approx(each, rel=1e-7) for each in GOLDEN.values()]


GOLDEN = {
    (0, 0): [0.39825519919395447, 0.3589390516281128, 0.42375797033309937],
    (1, 0): [0.6433464884757996, 0.5335935354232788, 0.8586251735687256],
    (2**64 - 1, 4095): [0.7265197038650513, 0.1591905951499939, 0.1517842411994934],
}


@pytest.mark.parametrize("count", [1, 2, 7, 31, 32])
def test_the_likeliest_tokens_are_the_first_of_equal_ones_in_every_row(count: int) -> None:
    """A batch has rows with and without equal scores at the end of their likeliest tokens."""
    generator = torch.Generator().manual_seed(count)
    apart = torch.randn(4, 32, generator=generator)
    raw = torch.cat((apart, apart.round(), torch.zeros(1, 32), apart.masked_fill(apart < 0, float("-inf"))))
    for row, places in zip(raw.tolist(), likeliest_ids(raw, count).tolist(), strict=True):
        from_above = sorted((-score, place) for place, score in enumerate(row))
        assert places == [place for _, place in from_above[:count]]
