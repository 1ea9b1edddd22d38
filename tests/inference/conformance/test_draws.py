"""Tests that an engine draws the same tokens however work is divided, and masks, scores and checks them."""

import random
from collections import abc
from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from baton.engine_interface import GrammarUnsatisfied, LogitsNotFinite, Row, Sequence
from baton.grammars.grammar_state import GrammarLost
from baton.inference.step_engine import StepEngine
from baton.rooms.request import Grammar, GrammarKind, Sampling, Score
from tests.inference.engine_worker import GREEDY, Guesses, ShuffledWorker, Tenant, memory_of

LENGTHS: Final = (1, 15, 16, 17, 33, 70)
TOKENS: Final = 12
WHOLE: Final = 10**6
CLOSE: Final = 1e-4
SEEDED: Final = Sampling(temperature=1.0, seed=7)
SAMPLINGS: Final = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": Sampling(temperature=0.9, seed=3, top_k=50, repetition_penalty=1.3, presence_penalty=0.5),
}


def prompts(engine: StepEngine, lengths: abc.Sequence[int] = LENGTHS) -> list[list[int]]:
    numbers = random.Random(11)
    return [[numbers.randrange(engine.vocab_size) for _ in range(length)] for length in lengths]


def chunk_for(engine: StepEngine, tokens: int) -> int:
    """Return `tokens`, or the whole prompt for an engine that computes no chunks."""
    return tokens if engine.facts.chunked_prompts else WHOLE


def drawn_alone(engine: StepEngine, sampling: Sampling) -> list[list[int]]:
    """Return the output of each prompt, computed whole and one after the other."""
    worker = ShuffledWorker(engine)
    outputs = []
    for prompt in prompts(engine):
        tenant = worker.admit(prompt, TOKENS, sampling)
        outputs += worker.run([tenant], WHOLE)
        worker.release(tenant)
    return outputs


@pytest.mark.parametrize("chunk", [WHOLE, 32, 7], ids=["whole", "chunk32", "chunk7"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_rows_together_draw_what_each_draws_alone(engine: StepEngine, sampling: Sampling, chunk: int) -> None:
    worker = ShuffledWorker(engine, seed=1)
    tenants = [worker.admit(prompt, TOKENS, sampling) for prompt in prompts(engine)]
    together = worker.run(tenants, chunk_for(engine, chunk))
    for tenant in tenants:
        worker.release(tenant)
    assert together == drawn_alone(engine, sampling)


def test_memory_may_move_between_any_two_steps(engine: StepEngine) -> None:
    worker = ShuffledWorker(engine)
    tenants = [worker.admit(prompt, TOKENS) for prompt in prompts(engine)]
    address = engine.cache.address
    while not all(tenant.done for tenant in tenants):
        worker.step(tenants, chunk_for(engine, 20))
        engine.cache.move()
        assert engine.cache.address != address
        address = engine.cache.address
    for tenant in tenants:
        worker.release(tenant)
    assert [tenant.sequence.output for tenant in tenants] == drawn_alone(engine, GREEDY)


def test_a_sequence_goes_on_from_copied_pages(engine: StepEngine) -> None:
    """As after a hand-over, another sequence continues from other pages with the same bytes."""
    worker = ShuffledWorker(engine)
    expected = drawn_alone(engine, SEEDED)
    worker = ShuffledWorker(engine)
    for prompt, right in zip(prompts(engine), expected, strict=True):
        before = worker.admit(prompt, TOKENS, SEEDED)
        while len(before.sequence.output) < 1:
            worker.step([before], chunk_for(engine, 20))
        after = Tenant(Sequence(before.sequence.request, [*before.sequence.output]), before.computed)
        worker.grow(after, after.computed)
        for one, other in zip(before.pages, after.pages, strict=True):
            memory_of(engine)[other] = memory_of(engine)[one]
        worker.release(before)
        assert worker.run([after], WHOLE) == [right]
        worker.release(after)


def test_drawn_is_drawn_the_tokens_with_drafts_are_those_without(engine: StepEngine) -> None:
    worker = ShuffledWorker(engine)
    tenants = [worker.admit(prompt, TOKENS, SEEDED) for prompt in prompts(engine)]
    expected = drawn_alone(engine, SEEDED)
    outputs = {
        each.sequence.request.request_id: output for each, output in zip(tenants, expected, strict=True)
    }
    worker = ShuffledWorker(engine)
    guess: abc.Callable[[Tenant], abc.Sequence[int]] = Guesses(outputs, engine.vocab_size)
    if not engine.facts.chunked_prompts:
        guess = lambda _: ()  # noqa: E731
    found, _ = worker.answers(tenants, guess, chunk_for(engine, 20))
    for tenant in tenants:
        worker.release(tenant)
    assert [[token.id for token in tokens] for tokens in found] == expected


@pytest.mark.parametrize("chunk", [WHOLE, 7], ids=["whole", "chunk7"])
def test_a_prompts_scores_are_those_of_its_log_probabilities(engine: StepEngine, chunk: int) -> None:
    """Each prefix of a prompt draws its next token with the log-probability that the whole prompt scores."""
    (prompt,) = prompts(engine, (20,))
    worker = ShuffledWorker(engine)
    tenant = worker.admit(prompt, 1, prompt_logprobs=2)
    worker.run([tenant], chunk_for(engine, chunk))
    worker.release(tenant)
    assert tenant.sequence.scores is not None
    scores: list[Score] = tenant.sequence.scores.values
    assert len(scores) == len(prompt) - 1
    for length, score in enumerate(scores, 1):
        asked = replace(GREEDY, top_logprobs=2, logprob_token_ids=(prompt[length],))
        prefix = worker.admit(prompt[:length], 1, asked)
        (token,) = worker.step([prefix], WHOLE)
        worker.release(prefix)
        assert token is not None
        *top, (_, own) = token.top
        assert score.logprob == pytest.approx(own, abs=CLOSE)
        assert [each for each, _ in score.top] == [each for each, _ in top]


def test_own_draws_each_choice_is_drawn_as_a_request_of_its_own(engine: StepEngine) -> None:
    seeds = (11, 12, 13) if engine.facts.chunked_prompts else (11,)
    worker = ShuffledWorker(engine)
    for prompt in prompts(engine):
        first = worker.admit(prompt, TOKENS, replace(SEEDED, seed=seeds[0]))
        worker.step([first], WHOLE)
        choices = [first, *(worker.fork(first, seed) for seed in seeds[1:])]
        together = worker.run(choices, WHOLE)
        alone = []
        for seed in seeds:
            tenant = worker.admit(prompt, TOKENS, replace(SEEDED, seed=seed))
            alone += worker.run([tenant], WHOLE)
            worker.release(tenant)
        for each in reversed(choices):
            worker.release(each)
        assert together == alone


class Ascending:
    """Grammar state that allows ids above the last one, and ends below the tenth of the vocabulary."""

    def __init__(self, vocabulary: int, fails_at: int = WHOLE) -> None:
        self._vocabulary, self._fails_at = vocabulary, fails_at

    def allowed(self, _: object, output: abc.Sequence[int]) -> bytes:
        if len(output) == self._fails_at:
            raise GrammarLost("nothing is allowed there")
        first = output[-1] + 1 if output else 0
        last = min(first + self._vocabulary // 20, self._vocabulary)
        bits = sum(1 << each for each in range(first, last))
        return bits.to_bytes(-(-self._vocabulary // 8), "little")


def constrained(worker: ShuffledWorker, prompt: list[int], fold: Ascending) -> Tenant:
    tenant = worker.admit(prompt, TOKENS, SEEDED)
    held = replace(tenant.sequence.request, grammar=Grammar(GrammarKind.REGEX, "a"))
    tenant.sequence = Sequence(held, [])
    state: Any = fold
    tenant.sequence.fold = state
    return tenant


def test_a_row_draws_within_its_grammar_and_others_beside_it_do_not(engine: StepEngine) -> None:
    worker = ShuffledWorker(engine)
    free = [worker.admit(prompt, TOKENS, SEEDED) for prompt in prompts(engine)]
    tenant = constrained(worker, prompts(engine, (20,))[0], Ascending(engine.vocab_size))
    outputs = worker.run([*free, tenant], chunk_for(engine, 20))
    for each in (*free, tenant):
        worker.release(each)
    assert outputs[-1] == sorted(set(outputs[-1]))
    assert outputs[:-1] == drawn_alone(engine, SEEDED)


def rows_of(tenants: abc.Sequence[Tenant]) -> list[Row]:
    return [
        Row(each.sequence, each.computed, each.sequence.length, (each.pages,), sample=True)
        for each in tenants
    ]


def grown(worker: ShuffledWorker, tenants: abc.Sequence[Tenant]) -> list[Tenant]:
    for each in tenants:
        worker.grow(each, each.sequence.length + 1)
    return [*tenants]


def test_a_row_that_cannot_follow_its_grammar_says_so_alone(engine: StepEngine) -> None:
    worker = ShuffledWorker(engine)
    (prompt,) = prompts(engine, (20,))
    lost = constrained(worker, prompt, Ascending(engine.vocab_size, fails_at=0))
    free = worker.admit(prompt, TOKENS)
    why, tokens = engine.step(rows_of(grown(worker, [lost, free])))
    assert isinstance(why, GrammarUnsatisfied)
    assert isinstance(tokens, tuple)
    for each in (lost, free):
        worker.release(each)


def test_a_row_whose_pages_hold_no_numbers_says_so_alone(engine: StepEngine) -> None:
    worker = ShuffledWorker(engine)
    broken, sound = (worker.admit(prompt, TOKENS) for prompt in prompts(engine, (33, 33)))
    expected = worker.run([again := worker.admit(sound.sequence.request.prompt, TOKENS)], WHOLE)
    worker.release(again)
    worker.step([broken, sound], WHOLE)
    memory_of(engine)[broken.pages[0]] = 0xFF  # NaN in every format
    while not sound.done:
        why, tokens = engine.step(rows_of(grown(worker, [broken, sound])))
        assert isinstance(why, LogitsNotFinite)
        assert isinstance(tokens, tuple)
        sound.computed = sound.sequence.length
        sound.sequence.output += [token.id for token in tokens]
    assert [sound.sequence.output] == expected
    for each in (broken, sound):
        worker.release(each)


def test_pages_and_sequences_are_usable_after_eight_failures_in_a_row(
    engine: StepEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails after its keys and values are written, as by a lack of memory for logits."""
    worker = ShuffledWorker(engine)
    expected = drawn_alone(engine, GREEDY)
    worker = ShuffledWorker(engine)
    tenants = [worker.admit(prompt, TOKENS) for prompt in prompts(engine)]
    worker.step(tenants, WHOLE)
    logits = engine.runner.logits

    def fail(rows: abc.Sequence[Row]) -> torch.Tensor | None:
        logits(rows)
        raise torch.OutOfMemoryError("no memory for the logits")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "logits", fail)
        for _ in range(8):
            with pytest.raises(torch.OutOfMemoryError):
                engine.step(rows_of(grown(worker, tenants)))
    gone, *others = tenants
    worker.release(gone)
    outputs = worker.run(others, WHOLE)
    for each in others:
        worker.release(each)
    assert outputs == expected[1:]
    assert drawn_alone(engine, GREEDY) == expected


def test_a_released_sequences_pages_may_be_anothers_at_once(engine: StepEngine) -> None:
    """The next owner draws the tokens that it draws alone, also beside sequences that go on."""
    expected = drawn_alone(engine, GREEDY)
    worker = ShuffledWorker(engine)
    going = [worker.admit(prompt, TOKENS) for prompt in prompts(engine)[:2]]
    for prompt, right in zip(prompts(engine)[2:], expected[2:], strict=True):
        tenant = worker.admit(prompt, TOKENS)
        while not tenant.done:
            worker.step([*going, tenant], chunk_for(engine, 20))
        assert tenant.sequence.output == right
        worker.release(tenant)
    for each in going:
        worker.release(each)
    assert [each.sequence.output for each in going] == expected[:2]
