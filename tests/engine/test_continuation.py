"""Tests that a request which continues in a new room draws the same tokens as in one room.

Its prompt and the output so far are computed anew, by prefill in chunks, and handed over. In fp32, where the
way of computing does not change a draw.
"""

from dataclasses import replace

import pytest

from baton.engine_interface import Sequence
from baton.rooms.request import FinishReason, Request, Sampling, Token
from tests.engine.conftest import MakeEngine
from tests.engine.test_equals_reference import random_prompts
from tests.inference.engine_worker import GREEDY, ShuffledWorker, Tenant, hand_over

OUTPUT_TOKENS = 24
CUTS = (1, 2, 8, 15, 16, 23)
PENALISED = Sampling(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.8, frequency_penalty=0.6)
ONCE_EACH = Sampling(temperature=0.0, presence_penalty=50.0, frequency_penalty=50.0)

SAMPLINGS = {
    "greedy": GREEDY,
    "greedy, penalties": PENALISED,
    "greedy, no token twice": ONCE_EACH,
    "seeded": Sampling(seed=11),
    "seeded, cut": Sampling(seed=12, temperature=1.5, top_k=30, top_p=0.9, min_p=0.01),
    "seeded, penalties": replace(PENALISED, seed=13, temperature=1.2),
    "seeded, biased": Sampling(seed=14, logit_bias=((3, 4.0), (5, -100.0))),
    "logprobs": Sampling(seed=15, top_logprobs=4),
}


def answer(prefill: ShuffledWorker, decode: ShuffledWorker, request: Request, chunk: int = 10) -> list[Token]:
    """Return all tokens of one room: the first from prefill, the others after the hand-over."""
    tokens: list[Token] = []

    def step(worker: ShuffledWorker, tenant: Tenant) -> None:
        (token,) = worker.step([tenant], chunk)
        if token is not None:
            tokens.append(token)

    tenant = Tenant(Sequence(request, list(request.output)))
    while not tokens:
        step(prefill, tenant)
    there = hand_over(tenant, prefill, decode)
    prefill.release(tenant)
    while not there.done:
        step(decode, there)
    decode.release(there)
    return tokens


@pytest.fixture(params=["llama-gqa-untied", "deepseek-v3-latents"])
def workers(request: pytest.FixtureRequest, tiny_engine: MakeEngine) -> tuple[ShuffledWorker, ShuffledWorker]:
    return (
        ShuffledWorker(tiny_engine(request.param), seed=1),
        ShuffledWorker(tiny_engine(request.param, which=1), seed=2),
    )


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_a_cut_off_answer_goes_on_as_the_unbroken_one(
    workers: tuple[ShuffledWorker, ShuffledWorker], sampling: Sampling
) -> None:
    """The answer is cut off at any place, also twice. Logprobs are compared, too."""
    (prompt,) = random_prompts((40,))
    request = Request("mine", tuple(prompt), OUTPUT_TOKENS, min_tokens=20, sampling=sampling)
    whole = answer(*workers, request)
    ids = [token.id for token in whole]
    assert len(ids) == OUTPUT_TOKENS
    for cut in CUTS:
        rest = answer(*workers, replace(request, output=tuple(ids[:cut])))
        assert [token.id for token in rest] == ids[cut:]
        for old, new in zip(whole[cut:], rest, strict=True):
            assert (old.logprob is None) == (new.logprob is None)
            if old.logprob is not None and new.logprob is not None:
                assert new.logprob == pytest.approx(old.logprob, abs=1e-4)
                assert [each for each, _ in new.top] == [each for each, _ in old.top]


def test_the_settings_make_a_difference_to_the_answer(workers: tuple[ShuffledWorker, ShuffledWorker]) -> None:
    """Otherwise the test above would not depend on them."""
    (prompt,) = random_prompts((40,))
    told = [
        tuple(
            token.id
            for token in answer(*workers, Request("mine", tuple(prompt), OUTPUT_TOKENS, sampling=each))
        )
        for each in SAMPLINGS.values()
    ]
    assert len(set(told)) == len(told)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=21)], ids=["greedy", "seeded"])
def test_fewest_tokens_are_counted_over_all_rooms(
    workers: tuple[ShuffledWorker, ShuffledWorker], sampling: Sampling
) -> None:
    """An end-of-sequence id ends the sequence at the same place as in one room."""
    (prompt,) = random_prompts((40,))
    free = Request("mine", tuple(prompt), OUTPUT_TOKENS, sampling=sampling)
    ids = [token.id for token in answer(*workers, free)]
    request = replace(free, min_tokens=8, eos_token_ids=(ids[3], ids[12]))
    whole = [token.id for token in answer(*workers, request)]
    assert 8 <= len(whole) < OUTPUT_TOKENS or request.finish_reason(whole) is FinishReason.LENGTH
    assert not set(whole[:7]) & set(request.eos_token_ids)
    for cut in range(1, len(whole)):
        rest = answer(*workers, replace(request, output=tuple(whole[:cut])))
        assert [token.id for token in rest] == whole[cut:]


def test_penalties_of_earlier_output_are_those_of_output_and_not_of_prompt(
    workers: tuple[ShuffledWorker, ShuffledWorker],
) -> None:
    """Presence and frequency count output alone: output that is sent as prompt draws something else."""
    (prompt,) = random_prompts((40,))
    request = Request("mine", tuple(prompt), OUTPUT_TOKENS, sampling=ONCE_EACH)
    ids = tuple(token.id for token in answer(*workers, request))
    as_prompt = replace(request, prompt=(*prompt, *ids[:8]), max_tokens=OUTPUT_TOKENS - 8)
    assert tuple(token.id for token in answer(*workers, as_prompt)) != ids[8:]
