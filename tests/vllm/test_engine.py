"""Tests of the engine on vLLM against vLLM's own `LLM`: rows whole, in chunks, together, with drafts."""

from typing import Any

import pytest
import torch

from baton.engine_interface import LogitsNotFinite, PromptScores, Row, Sequence
from baton.rooms.request import Request, Sampling
from tests.vllm.conftest import TOKENS
from tests.vllm.driving import GREEDY, Driver

Ids = list[list[int]]


def test_each_prompt_alone(driver: Driver, prompts: Ids, alone: Ids) -> None:
    assert [driver.answers([each], TOKENS)[0] for each in prompts] == alone


@pytest.mark.parametrize("chunk", [0, 7, 24, 64])
def test_all_prompts_together(driver: Driver, prompts: Ids, alone: Ids, chunk: int) -> None:
    assert driver.answers(prompts, TOKENS, chunk=chunk) == alone


def test_drafts_change_nothing(driver: Driver, prompts: Ids, alone: Ids) -> None:
    assert driver.answers(prompts, TOKENS, drafts=alone) == alone


def test_moves_change_nothing(driver: Driver, prompts: Ids, alone: Ids) -> None:
    assert driver.answers(prompts, TOKENS, moving=True) == alone


def test_a_lost_cache_of_requests_changes_nothing(driver: Driver, prompts: Ids, alone: Ids) -> None:
    """The runner forgets its requests before each step, so that all rows are new to it."""
    requests = driver.engine.runner.requests
    schedule = requests.schedule

    def forgetful(rows: Any) -> Any:
        requests.forget_all()
        return schedule(rows)

    requests.schedule = forgetful
    try:
        assert driver.answers(prompts, TOKENS) == alone
    finally:
        requests.schedule = schedule


def test_seeded_draws_do_not_depend_on_the_batch(driver: Driver, prompts: Ids) -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    apart = [driver.answers([each], TOKENS, sampling=sampling)[0] for each in prompts]
    assert driver.answers(prompts, TOKENS, chunk=24, sampling=sampling) == apart


def test_a_step_wider_than_one_call_of_the_worker(driver: Driver, prompts: Ids, alone: Ids) -> None:
    model = driver.engine.runner.model
    rows_max, model.rows_max = model.rows_max, 3
    try:
        assert driver.answers(prompts, TOKENS) == alone
    finally:
        model.rows_max = rows_max


def test_released_sequences_are_forgotten(driver: Driver, prompts: Ids) -> None:
    driver.answers(prompts, 2)
    driver.answers(prompts[:1], 2)
    runner = driver.engine.runner
    assert len(runner.requests.known) <= 1  # the last one's release is seen by the next step
    assert len(runner.model.runner.requests) <= 1


def test_sequences_that_nobody_releases_are_bounded(engine: Any) -> None:
    driver, most = Driver(engine), engine.runner.requests.requests_max
    engine.runner.requests.requests_max = 4
    try:
        for number in range(10):
            row = Row(Sequence(Request(f"r{number}", (1, 2, 3), 2), []), 0, 3, ([number],), sample=False)
            driver.engine.step([row])
        assert len(engine.runner.requests.known) <= 5
        assert len(engine.runner.model.runner.requests) <= 5
    finally:
        engine.runner.requests.requests_max = most


def test_a_failed_step_leaves_a_working_engine(driver: Driver, prompts: Ids, alone: Ids) -> None:
    worker = driver.engine.runner.model.worker
    execute = worker.execute_model

    def fail(scheduled: Any) -> None:
        execute(scheduled)
        driver.engine.runner.model.runner.execute_model_state = None
        raise RuntimeError("out of luck")

    sequence = Sequence(Request("unlucky", tuple(prompts[3]), 4, sampling=GREEDY), [])
    for _ in range(8):
        worker.execute_model = fail
        try:
            with pytest.raises(RuntimeError, match="out of luck"):
                driver.engine.step([Row(sequence, 0, 32, ([3, 4],), sample=True)])
        finally:
            del worker.execute_model
    assert driver.answers(prompts, TOKENS) == alone


def test_prompt_scores_are_log_probabilities_of_the_prompt(driver: Driver, prompts: Ids) -> None:
    prompt = prompts[4]
    request = Request("scored", tuple(prompt), 2, sampling=GREEDY, prompt_logprobs=0)
    whole, pieces = Sequence(request, []), Sequence(request, [])
    whole.scores, pieces.scores = PromptScores(), PromptScores()
    driver.engine.step([Row(whole, 0, 33, ([5, 6],), sample=True)])
    for start, stop in ((0, 20), (20, 33)):
        driver.engine.step([Row(pieces, start, stop, ([7, 8],), sample=stop == 33)])
    assert len(whole.scores.values) == 32
    assert [each.logprob for each in pieces.scores.values] == pytest.approx(
        [each.logprob for each in whole.scores.values], abs=1e-4
    )


def test_pages_of_nan_are_reported(driver: Driver, prompts: Ids) -> None:
    """The row whose earlier pages are broken, and no other."""
    broken = Sequence(Request("broken", tuple(prompts[5]), 4, sampling=GREEDY), [])
    sound = Sequence(Request("sound", tuple(prompts[3]), 4, sampling=GREEDY), [])
    driver.engine.cache.tensor[9].fill_(float("nan"))
    first, second = driver.engine.step(
        [Row(broken, 32, 64, ([9, 10],), sample=True), Row(sound, 0, 32, ([11],), sample=True)]
    )
    assert isinstance(first, LogitsNotFinite)
    assert isinstance(second, tuple)
    assert len(second) == 1


def test_a_step_writes_its_own_pages_only(driver: Driver, prompts: Ids) -> None:
    cache = driver.engine.cache
    cache.tensor.fill_(3.0)
    sequence = Sequence(Request("mine", tuple(prompts[6]), 4, sampling=GREEDY), [])
    driver.engine.step([Row(sequence, 0, 150, ([7, 2, 9, 4, 0],), sample=True)])
    written = (cache.tensor != 3.0).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert written == [0, 2, 4, 7, 9]


def test_a_handed_over_page_is_the_same_bytes(driver: Driver, prompts: Ids, alone: Ids) -> None:
    """A prompt's pages, copied to others, are all that its continuation needs."""
    cache, prompt = driver.engine.cache, prompts[6]
    sent = Sequence(Request("sent", tuple(prompt), TOKENS, sampling=GREEDY), [])
    [first] = driver.engine.step([Row(sent, 0, 150, (range(6),), sample=True)])
    assert isinstance(first, tuple)
    target = torch.arange(20, 26)
    cache.tensor[target] = cache.tensor[torch.arange(6)]
    cache.tensor[:6] = float("nan")
    got = Sequence(Request("got", tuple(prompt), TOKENS, sampling=GREEDY), [first[0].id])
    while len(got.output) < TOKENS:
        [taken] = driver.engine.step([Row(got, got.length - 1, got.length, (target.tolist(),), sample=True)])
        assert isinstance(taken, tuple)
        got.output.append(taken[0].id)
    assert got.output == alone[6]
