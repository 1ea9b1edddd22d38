"""Tests that answers with a grammar follow it wherever they are drawn, and others are unchanged."""

from collections import Counter
from collections.abc import Sequence as Sequenced
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from baton.engine.loading.engine_loading import load_engine
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import DrawResult, GrammarUnsatisfied, LogitsNotFinite, Sequence
from baton.grammars.grammar_state import GrammarLost
from baton.rooms.request import FinishReason, Grammar, Request, Sampling, Token
from baton.sampling.grammar_masks import apply_masks
from baton.sampling.sampler import sample
from tests.engine.tiny_models import SHAPE, save
from tests.grammars.answers import END, PADDING, fold_of, ids, regex, schema, text_of, tokens_in, vocabulary
from tests.inference.engine_worker import GREEDY, ShuffledWorker, Tenant, hand_over

VOCABULARY = vocabulary().vocab_size
DIGITS = regex("[0-9]{4,6}")
OBJECT = schema(
    {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"enum": [1, 2, 3]}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
WARM = Sampling(temperature=1.0, seed=5)


def logits(rows: int = 1, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def held(
    grammar: Grammar | None, sampling: Sampling = GREEDY, output: Sequenced[int] = (), **more: Any
) -> Sequence:
    asked = Request("held", (1,), 1000, eos_token_ids=(END,), sampling=sampling, grammar=grammar, **more)
    made = Sequence(asked, [*output])
    made.fold = None if grammar is None else fold_of(grammar)
    return made


def ids_of(drawn: Sequenced[DrawResult]) -> list[int]:
    return [each.id for each in drawn if isinstance(each, Token)]


def test_what_is_drawn_is_allowed_and_rows_without_a_grammar_draw_what_they_did() -> None:
    scores = logits(3)
    free = [held(None, replace(WARM, seed=seed)) for seed in (1, 2)]
    alone = [ids_of(sample(scores[row : row + 1], [each]))[0] for row, each in zip((0, 2), free, strict=True)]
    allowed = {*tokens_in(fold_of(DIGITS).allowed(held(DIGITS).request, []))}
    for seed in range(50):
        three = [free[0], held(DIGITS, replace(WARM, seed=seed)), free[1]]
        first, between, last = ids_of(sample(scores, three))
        assert [first, last] == alone
        assert between in allowed


def test_a_mask_comes_first_so_that_nothing_brings_back_what_is_forbidden() -> None:
    (fox,) = ids("x")
    pushed = replace(WARM, logit_bias=((fox, 100.0),), repetition_penalty=0.01, presence_penalty=-2.0)
    for asked in (pushed, replace(pushed, temperature=0.0), replace(pushed, top_k=1)):
        assert text_of(ids_of(sample(logits(), [held(DIGITS, asked, output=ids("1"))]))).isdigit()


def test_the_only_token_is_drawn_however_unlikely_its_request_makes_it() -> None:
    least = replace(WARM, logit_bias=((END, -100.0),), min_p=1.0, top_p=0.01)
    assert ids_of(sample(logits(), [held(DIGITS, least, output=ids("123456"))])) == [END]
    assert ids_of(sample(logits(), [held(DIGITS, output=ids("123456"), min_tokens=99)])) == [END]
    assert ids_of(sample(logits(), [held(DIGITS, output=ids("123456"), ignore_eos=True)])) == [END]


def test_draws_follow_the_models_shares_of_what_is_allowed() -> None:
    scores = logits()
    allowed = tokens_in(fold_of(DIGITS).allowed(held(DIGITS).request, []))
    shares = torch.softmax(scores[0, allowed].double(), -1)
    draws = 2000
    asked = held(DIGITS, WARM)
    rows = [Sequence(replace(asked.request, sampling=replace(WARM, seed=seed)), []) for seed in range(draws)]
    for each in rows:
        each.fold = asked.fold
    found = Counter(ids_of(sample(scores.expand(draws, -1), rows)))
    assert {*found} <= {*allowed}
    for id_, share in zip(allowed, shares.tolist(), strict=True):
        assert abs(found[id_] / draws - share) < 0.05


def test_log_probabilities_are_those_of_what_is_allowed() -> None:
    """They are of the masked distribution, before penalties and temperature, as in vLLM."""
    scores = logits()
    allowed = tokens_in(fold_of(DIGITS).allowed(held(DIGITS).request, []))
    (token,) = sample(scores, [held(DIGITS, replace(GREEDY, top_logprobs=3))])
    assert isinstance(token, Token)
    whole = torch.log_softmax(scores[0, allowed], -1)
    assert token.logprob == pytest.approx(float(whole.max()), abs=1e-5)
    assert {id_ for id_, _ in token.top} <= {*allowed}
    (last,) = sample(scores, [held(DIGITS, replace(GREEDY, top_logprobs=2), output=ids("123456"))])
    assert isinstance(last, Token)
    assert (last.id, last.logprob) == (END, 0.0)
    assert len(last.top) == 2


def test_logits_that_are_no_numbers_stay_none_whether_they_are_allowed_or_not() -> None:
    scores = logits(2)
    scores[0, ids("x")[0]] = float("nan")
    drawn = sample(scores, [held(DIGITS), held(DIGITS)])
    assert isinstance(drawn[0], LogitsNotFinite)
    assert isinstance(drawn[1], Token)


def test_one_that_cannot_be_held_fails_alone_and_what_is_not_compiled_is_not_drawn() -> None:
    late = held(DIGITS)
    late.fold = None
    foreign = held(DIGITS, output=ids("fox"))
    drawn = sample(logits(3), [foreign, held(DIGITS), late])
    assert [type(each) for each in drawn] == [GrammarUnsatisfied, Token, GrammarUnsatisfied]


def test_a_mask_of_a_narrower_vocabulary_allows_nothing_beyond_it() -> None:
    """A draft model's vocabulary may be wider than that of its model."""
    mask = fold_of(DIGITS).allowed(held(DIGITS).request, [])
    wide = torch.randn(2, 8 * len(mask) + 40)
    found = apply_masks(wide, [1], [mask])
    assert torch.equal(found[0], wide[0])
    assert found[1].isfinite().nonzero().flatten().tolist() == tokens_in(mask)


def test_masks_are_applied_to_the_rows_that_they_are_of() -> None:
    masks = [fold_of(regex(each)).allowed(held(DIGITS).request, []) for each in ("a", "b")]
    scores = apply_masks(torch.zeros(4, VOCABULARY), [3, 1, 0], [masks[0], masks[1], GrammarLost("gone")])
    (a,), (b,) = ids("a"), ids("b")
    assert [[*torch.isfinite(row).nonzero()[:, 0].tolist()] for row in (scores[3], scores[1])] == [[a], [b]]
    assert bool((scores[[0, 2]] == 0).all())


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchEngine, TorchEngine]:
    """Engines of two workers with one random model. The vocabulary is the tokenizer's, padded."""
    shape = {**SHAPE, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    directory = save(LlamaConfig(**shape), tmp_path_factory.mktemp("held"))
    first, second = (load_engine(directory, kv_cache_memory=2**22, page_tokens=4) for _ in range(2))
    return first, second


def admitted(
    worker: ShuffledWorker, grammar: Grammar, sampling: Sampling, output: Sequenced[int] = ()
) -> Tenant:
    tenant = worker.admit(ids("The fox"), 60, sampling)
    asked = replace(tenant.sequence.request, eos_token_ids=(END,), grammar=grammar, output=tuple(output))
    tenant.sequence = Sequence(asked, [*output])
    tenant.sequence.fold = fold_of(grammar)
    tenant.sequence.fold.follow(output)
    return tenant


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "drawn"])
@pytest.mark.parametrize("grammar", [DIGITS, OBJECT], ids=["regex", "schema"])
def test_an_answer_is_the_same_handed_over_and_gone_on_with_anywhere(
    engines: tuple[TorchEngine, TorchEngine], grammar: Grammar, sampling: Sampling
) -> None:
    """Prefill masks the first token and decode the others. A later room rebuilds the grammar state from the
    earlier output."""
    here, there = ShuffledWorker(engines[0]), ShuffledWorker(engines[1], seed=1)
    (whole,) = here.run([admitted(here, grammar, sampling)], chunk=8)
    asked = admitted(here, grammar, sampling).sequence.request
    assert asked.finish_reason(whole) is FinishReason.STOP
    assert len(whole) > 4

    sender = admitted(here, grammar, sampling)
    while not sender.sequence.output:
        here.step([sender], chunk=8)
    receiver = hand_over(sender, here, there)
    receiver.sequence.fold = fold_of(grammar)
    assert there.run([receiver], chunk=8) == [whole]

    for had in range(1, len(whole)):
        assert there.run([admitted(there, grammar, sampling, whole[:had])], chunk=8) == [whole], had


def test_the_padding_of_a_vocabulary_is_never_drawn(engines: tuple[TorchEngine, TorchEngine]) -> None:
    worker = ShuffledWorker(engines[0])
    for seed in range(5):
        (output,) = worker.run([admitted(worker, regex(r"(.|\n){20}"), replace(WARM, seed=seed))], chunk=8)
        assert max(output) < VOCABULARY - PADDING
