"""Tests that tiny models of many types, computed on vLLM, answer as vLLM's own `LLM` alone does."""

from functools import partial
from typing import Any

import pytest

from tests.models.comparison import TrialVerdict
from tests.models.vllm_outcomes import VllmOutcomes
from tests.vllm.model_sweep import all_types, outcome_of, sweep
from tests.vllm.model_trial import try_engine

SOME = ("llama", "gpt2", "bloom", "mistral", "phi3", "gemma4_text", "llama4_text", "mamba")
SWEEP_S = 3600.0


@pytest.mark.timeout(300)
def test_some_types_are_as_recorded() -> None:
    """Own code of vLLM's, learned positions, ALiBi, windows, packed weights, two KV groups, chunks, and a
    state that is refused."""
    recorded = VllmOutcomes.read().types
    assert dict(sweep(SOME)) == {kind: recorded[kind] for kind in SOME}


def off_by_one(engine: Any) -> None:
    """Let each layer with a window see one token less."""
    windows = 0
    for layer in engine.runner.model.runner.model.modules():
        if getattr(getattr(layer, "impl", None), "sliding_window", -1) > 0:
            layer.impl.sliding_window -= 1
            windows += 1
    assert windows, "the model has no windows"


@pytest.mark.timeout(300)
def test_the_trial_can_fail_a_window_that_is_off_by_a_token() -> None:
    outcome = outcome_of("mistral", partial(try_engine, disturb=off_by_one))
    assert outcome.verdict is TrialVerdict.WRONG, outcome


@pytest.mark.all_models
@pytest.mark.timeout(SWEEP_S)
def test_all_types_are_as_recorded() -> None:
    outcomes = dict(sweep(all_types()))
    bad = (TrialVerdict.WRONG, TrialVerdict.BROKEN)
    assert {kind: each for kind, each in outcomes.items() if each.verdict in bad} == {}
    assert outcomes == VllmOutcomes.read().types
