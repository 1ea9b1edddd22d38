"""Tests that tokens with drafts are those without, whatever the drafts, in every execution."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
from transformers import LlamaConfig

from baton.engine.loading.engine_loading import load_engine
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import (
    DrawResult,
    GrammarUnsatisfied,
    LogitsNotFinite,
    PageSum,
    PageSumRequest,
    Proposal,
    Row,
    RowResult,
    Sequence,
    take,
)
from baton.grammars.grammar_state import GrammarState, Matcher
from baton.rooms.request import Grammar, Request, Sampling, Token
from baton.sampling.draft_rows import split_drafts
from tests.engine.conftest import MakeEngine
from tests.engine.execution.compiled_kernels import Directory, load, needs_kernel
from tests.engine.execution.test_row_by_row import bloom
from tests.engine.executions import embedding_of
from tests.engine.test_continuation import SAMPLINGS
from tests.engine.test_equals_reference import random_prompts
from tests.engine.tiny_models import SHAPE, save
from tests.grammars.answers import NAMED, matcher_of
from tests.inference.engine_worker import DRAFTS_MAX, GREEDY, Guesses, ShuffledWorker, Tenant
from tests.sampling.test_grammar_masks import DIGITS, OBJECT, VOCABULARY, WARM, admitted

LENGTHS: Final = (1, 15, 30, 47)
TOKENS: Final = 40
WINDOWED: Final = "three queries a head"


@pytest.fixture(params=["calls", "calls, a window", "latents", "compiled", "row by row"])
def engine(
    request: pytest.FixtureRequest,
    tiny_engine: MakeEngine,
    directory: Directory,
    tmp_path: Path,
) -> TorchEngine:
    ways: dict[str, Callable[[], TorchEngine]] = {
        "calls": lambda: tiny_engine("llama-gqa-untied"),
        "latents": lambda: tiny_engine("deepseek-v3-latents"),
        "calls, a window": lambda: load(directory(WINDOWED), dtype=torch.float32, compiled=False),
        "compiled": lambda: load(directory(WINDOWED), dtype=torch.float32),
        "row by row": lambda: load_engine(
            bloom(tmp_path / "bloom"), dtype="float32", device="cpu", kv_cache_memory=2**23, threads=1
        ),
    }
    return ways[request.param]()


@needs_kernel
def test_drawn_is_drawn_the_tokens_with_drafts_are_those_without(engine: TorchEngine) -> None:
    """Greedy and seeded sequences, with penalties that count the output so far and with logprobs, share all
    steps."""
    prompts = random_prompts(LENGTHS)

    def asked(worker: ShuffledWorker) -> list[Tenant]:
        return [
            worker.admit(prompts[place % len(prompts)], TOKENS, sampling)
            for place, sampling in enumerate(SAMPLINGS.values())
        ]

    plain, guessing = ShuffledWorker(engine), ShuffledWorker(engine)
    expected, steps = plain.answers(asked(plain), lambda _: ())
    tenants = asked(guessing)
    outputs = {
        each.sequence.request.request_id: [token.id for token in tokens]
        for each, tokens in zip(tenants, expected, strict=True)
    }
    found, fewer = guessing.answers(tenants, Guesses(outputs, engine.vocab_size))
    assert fewer < 0.8 * steps, "some drafts are taken"
    for mine, right in zip(found, expected, strict=True):
        assert [token.id for token in mine] == [token.id for token in right]
        for one, other in zip(mine, right, strict=True):
            assert one.logprob == (None if other.logprob is None else pytest.approx(other.logprob, abs=1e-4))
            assert [each for each, _ in one.top] == [each for each, _ in other.top]


@needs_kernel
@pytest.mark.parametrize("engine", ["calls", "calls, a window", "compiled"], indirect=True)
def test_not_taken_never_read_drafts_whose_keys_are_no_numbers_change_nothing(engine: TorchEngine) -> None:
    """One token's embedding is NaN. As a draft it lies behind the known tokens, in the same page or the next,
    and is not taken."""
    (prompt,) = random_prompts((27,))
    worker = ShuffledWorker(engine)
    (expected,) = worker.run([worker.admit(prompt, TOKENS)], 100)
    unknown = next(each for each in range(engine.vocab_size) if each not in {*prompt, *expected})
    embedding = embedding_of(engine)
    kept = embedding[unknown].clone()
    again = ShuffledWorker(engine)
    tenant = again.admit(prompt, TOKENS)

    def some_and_unknown(_: Tenant) -> list[int]:
        had = len(tenant.sequence.output)
        return [*expected[had : had + had % 3], unknown, unknown]

    with torch.inference_mode():
        embedding[unknown] = float("nan")
    try:
        while not tenant.done:
            again.guess([tenant], 100, some_and_unknown)
    finally:
        with torch.inference_mode():
            embedding[unknown] = kept
    assert tenant.sequence.output == expected


def test_a_sum_of_pages_goes_over_what_was_taken(tiny_engine: MakeEngine) -> None:
    """The sum covers what is known when a step begins, as without drafts. Drafts that were not taken are in
    no sum."""
    engine = tiny_engine("llama-gqa-untied")
    (prompt,) = random_prompts((20,))
    worker = ShuffledWorker(engine)
    (expected,) = worker.run([worker.admit(prompt, TOKENS)], 100)
    tenant = worker.admit(prompt, TOKENS)
    tenant.sequence.page_sum = summed = PageSum(0)
    guess = Guesses({tenant.sequence.request.request_id: expected}, engine.vocab_size)
    while not tenant.done:
        worker.guess([tenant], 100, guess)
        anew = PageSum(0)
        engine.sum_pages([PageSumRequest(anew, (tenant.pages,), summed.stop, ends=False)])
        assert summed.here == summed.everywhere == anew.here
    assert tenant.sequence.output == expected
    assert summed.stop > len(prompt) + TOKENS - DRAFTS_MAX - 2


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    shape = {**SHAPE, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    return load_engine(save(LlamaConfig(**shape), tmp_path_factory.mktemp("held")), kv_cache_memory=2**22)


class Noting:
    """A grammar matcher that records the tokens it consumed, and never takes one back."""

    def __init__(self, matcher: Matcher) -> None:
        self.taken: list[int] = []
        self._matcher = matcher
        self.compute_bitmask, self.get_error = matcher.compute_bitmask, matcher.get_error
        self.is_accepting, self.is_error = matcher.is_accepting, matcher.is_error
        self.compute_ff_tokens = matcher.compute_ff_tokens

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        self.taken += sampled_tokens
        return self._matcher.consume_tokens(sampled_tokens)

    def reset(self) -> bool:
        raise AssertionError("the fold begins anew")

    def deep_copy(self) -> Matcher:
        raise AssertionError("nobody else goes on from here")


@pytest.mark.parametrize("grammar", [DIGITS, OBJECT], ids=["regex", "schema"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "drawn"])
def test_mask_is_fold_an_answer_with_drafts_is_held_to_its_grammar_as_without(
    speaking: TorchEngine, grammar: Grammar, sampling: Sampling
) -> None:
    """Some drafts are not allowed by the grammar, or lie behind the answer's end. The grammar state takes
    each token once."""
    worker = ShuffledWorker(speaking)
    (expected,) = worker.run([admitted(worker, grammar, sampling)], 100)
    for seed in range(5):
        tenant = admitted(worker, grammar, sampling)
        matcher = Noting(matcher_of(grammar))
        tenant.sequence.fold = GrammarState(matcher)
        guess = Guesses({tenant.sequence.request.request_id: expected}, VOCABULARY, seed)
        while not tenant.done:
            worker.guess([tenant], 100, guess)
        assert tenant.sequence.output == expected
        assert matcher.taken[: len(expected) - 1] == expected[:-1]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "drawn"])
def test_what_a_grammar_forces_is_proposed_and_always_taken(
    speaking: TorchEngine, sampling: Sampling
) -> None:
    """The answer is the same in fewer steps, and the grammar state advances over each token once. Nothing is
    proposed behind the answer's end, or without a proposal to fill."""
    worker, prompt = ShuffledWorker(speaking), 1
    (expected,) = worker.run([plain := admitted(worker, NAMED, sampling)], 100)
    assert plain.sequence.proposal is None
    tenant = admitted(worker, NAMED, sampling)
    tenant.sequence.proposal = proposal = Proposal()
    matcher = Noting(matcher_of(NAMED))
    tenant.sequence.fold = GrammarState(matcher)
    steps = forced = 0
    while not tenant.done:
        assert proposal.forced == len(proposal.tokens)
        checked = [*proposal.tokens]
        (taken,) = worker.guess([tenant], 100, lambda _, drafts=checked: drafts)  # type: ignore[misc]
        assert [token.id for token in taken[: len(checked)]] == checked, "each is what was drawn"
        forced += len(checked)
        steps += 1
    assert tenant.sequence.output == expected
    assert forced > 5
    assert steps == prompt + len(expected) - forced - 1
    assert proposal.tokens == ()
    assert matcher.taken[: len(expected) - 1] == expected[:-1]


def test_drafts_are_fed_one_a_row_behind_the_row_of_what_is_known() -> None:
    sequence, other = (Sequence(Request(name, (1, 2, 3), 9), [4, 5]) for name in "ab")
    rows = [Row(sequence, 3, 5, ([0],), sample=True, drafts=[6, 7]), Row(other, 4, 5, ([1],), sample=True)]
    assert (rows[0].end, [*rows[0].fed], [*rows[0].wanted]) == (7, [4, 5, 6, 7], [4, 5, 6])
    laid = split_drafts(rows)
    assert [(row.start, row.stop, [*row.fed], [*row.wanted]) for row in laid] == [
        (3, 5, [4, 5], [4]),
        (5, 6, [6], [5]),
        (6, 7, [7], [6]),
        (4, 5, [5], [4]),
    ]
    assert [row.pages for row in laid] == [[0], [0], [0], [1]]
    assert split_drafts(rows[1:]) == rows[1:]
    assert sequence.output == [4, 5]


A, B, C = (Token(each) for each in (1, 2, 3))
NAN, LOST = LogitsNotFinite(), GrammarUnsatisfied()


@pytest.mark.parametrize(
    ("drafts", "drawn", "taken"),
    [
        ([], [A], (A,)),
        ([1], [A, B], (A, B)),
        ([2], [A], (A,)),
        ([1, 2], [A, B, C], (A, B, C)),
        ([1, 3], [A, B], (A, B)),
        ([1, 2], [NAN], NAN),
        ([1, 2], [A, NAN], (A,)),
        ([1, 2], [A, B, LOST], (A, B)),
        ([1], [LOST], LOST),
    ],
    ids=str,
)
def test_a_draft_is_taken_exactly_when_it_is_drawn_and_nothing_is_drawn_beyond(
    drafts: list[int], drawn: list[DrawResult], taken: RowResult
) -> None:
    """An iterator that ends here would raise if it were asked for more."""

    def draws() -> Iterator[DrawResult]:
        yield from drawn
        raise AssertionError("a draw too many")

    assert take(drafts, draws()) == taken
