"""Tests that tiny models of many types, computed on vLLM, answer as vLLM's own `LLM` alone does."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.errors import StartupError
from tests.models.comparison import TrialVerdict
from tests.models.recipes import CONTEXT
from tests.models.vllm_outcomes import VllmOutcomes
from tests.vllm.conftest import settings
from tests.vllm.model_recipes import save_model
from tests.vllm.model_sweep import all_types, call_in_process, outcome_of, sweep
from tests.vllm.model_trial import try_engine

STATES = ("qwen3_next", "mamba2", "lfm2", "mamba")
"""Models with states and attention, with states alone, with convolutions, and without kernels for CPUs."""
SOME = ("llama", "gpt2", "bloom", "mistral", "phi3", "gemma4_text", "llama4_text", *STATES)
SWEEP_S = 3600.0


@pytest.mark.timeout(300)
def test_some_types_are_as_recorded() -> None:
    """Own code of vLLM's, learned positions, ALiBi, windows, packed weights, two KV groups, chunks, and
    states."""
    recorded = VllmOutcomes.read().types
    assert dict(sweep(SOME)) == {kind: recorded[kind] for kind in SOME}


def refusal_of(kind: str, directory: Path, dtype: str) -> str:
    """Return with which words Baton's engine refuses a tiny model of the type `kind`."""
    from baton.vllm.engine_startup import start_rank

    save_model(kind, directory)
    try:
        start_rank(settings(str(directory), dtype=dtype, context_length=CONTEXT), 1)
    except StartupError as refusal:
        return str(refusal)
    return "served"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "words"),
    [("mamba", "has no attribute 'selective_scan_fwd'"), ("qwen3_next", "CPU GDN attention requires BF16")],
)
def test_what_vllm_does_not_compute_is_refused_in_its_words(kind: str, words: str, tmp_path: Path) -> None:
    refusal = call_in_process(refusal_of, kind, tmp_path / kind, "float32")
    assert refusal.startswith("vLLM does not compute the model")
    assert words in refusal


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
