"""Tests that rotary frequencies which depend on length are those of the configured context."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from baton.engine.loading.engine_loading import load_engine
from baton.engine.loading.model_loading import load_model
from baton.engine.torch_engine import TorchEngine
from baton.models.model_facts import ContextTooLong, UnsupportedModel
from tests.engine import tiny_models
from tests.engine.test_equals_reference import random_prompts
from tests.inference.engine_worker import ShuffledWorker
from tests.oracle import reference_greedy

ORIGINAL: Final = 32
LENGTHS: Final = (5, 30, 70)
OUTPUT_TOKENS: Final = 12
SHAPE: Final[dict[str, Any]] = {**tiny_models.SHAPE, "pad_token_id": 0}
LONGROPE: Final[dict[str, Any]] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * place for place in range(4)],
    "long_factor": [1.5 + 2.0 * place for place in range(4)],
    "original_max_position_embeddings": ORIGINAL,
}
PHI3: Final = transformers.Phi3Config(
    **{**SHAPE, "hidden_size": 48, "num_attention_heads": 6, "head_dim": 8},
    original_max_position_embeddings=ORIGINAL,
    rope_parameters=LONGROPE,
    sliding_window=None,
)
PHIMOE: Final = transformers.PhimoeConfig(
    **{**SHAPE, "hidden_size": 48, "num_attention_heads": 6, "head_dim": 8},
    original_max_position_embeddings=ORIGINAL,
    num_local_experts=2,
    num_experts_per_tok=1,
    rope_parameters=LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
    sliding_window=None,
)
BY_LENGTH: Final = {"phi3": PHI3, "phimoe": PHIMOE}


@pytest.fixture(scope="module", params=BY_LENGTH)
def longrope(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("longrope")
    return tiny_models.save(BY_LENGTH[request.param], root / request.param)


def engine_of(directory: Path, context_length: int = 0) -> TorchEngine:
    return load_engine(
        directory,
        dtype="float32",
        device="cpu",
        kv_cache_memory=2**21,
        threads=1,
        context_length=context_length,
    )


def outputs(engine: TorchEngine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    worker = ShuffledWorker(engine, seed=3)
    return worker.run([worker.admit(prompt, tokens) for prompt in prompts], chunk=7)


def of_long_factors(directory: Path, target: Path) -> Path:
    """Return the same model with a configuration that has the long factors only."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    turns = model.config.rope_parameters
    turns["short_factor"] = turns["long_factor"]
    if "long_mscale" in turns:
        turns["short_mscale"] = turns["long_mscale"]
    model.save_pretrained(target)
    return target


def test_within_the_original_positions_short_factors_count(longrope: Path) -> None:
    """This is the default, since most sequences are that short. The result equals the library's."""
    engine = engine_of(longrope)
    assert engine.model.facts.context_length == engine.layout.context_length == ORIGINAL
    prompts = random_prompts((5, 18))
    assert outputs(engine, prompts, 12) == reference_greedy(longrope, prompts, 12)


def test_a_longer_context_is_turned_by_the_long_factors_whatever_a_sequence_is(
    longrope: Path, tmp_path: Path
) -> None:
    """The factors are the same for all sequences of a batch, and for pages that a sequence filled while it
    was short."""
    engine = engine_of(longrope, tiny_models.CONTEXT)
    prompts = random_prompts(LENGTHS)
    answers = outputs(engine, prompts, OUTPUT_TOKENS)
    assert answers == reference_greedy(of_long_factors(longrope, tmp_path / "long"), prompts, OUTPUT_TOKENS)
    if (
        longrope.name == "phi3"
    ):  # PhiMoE's definition forgets the long factors, though not what goes with them
        assert answers[-1:] == reference_greedy(longrope, prompts[-1:], OUTPUT_TOKENS), (
            "as it is, beyond them"
        )


def test_a_context_within_the_original_positions_may_be_set_too(longrope: Path) -> None:
    assert engine_of(longrope, 16).model.facts.context_length == 16
    prompts = random_prompts((5,))
    assert outputs(engine_of(longrope, 16), prompts, 8) == reference_greedy(longrope, prompts, 8)


def test_dynamic_scaling_scales_nothing_within_the_positions_that_are_told(tmp_path: Path) -> None:
    turns = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    shape = {**tiny_models.SHAPE, "max_position_embeddings": 96}
    directory = tiny_models.save(
        transformers.LlamaConfig(**shape, rope_parameters=turns), tmp_path / "dynamic"
    )
    engine = engine_of(directory)
    assert engine.model.facts.context_length == 96
    prompts = random_prompts((5, 33, 80))
    assert outputs(engine, prompts, 12) == reference_greedy(directory, prompts, 12)


def test_a_length_that_dynamic_scaling_would_scale_is_refused_with_what_helps(tmp_path: Path) -> None:
    turns = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = transformers.LlamaConfig(**tiny_models.SHAPE, rope_parameters=turns, model_max_length=1024)
    directory = tiny_models.save(config, tmp_path / "dynamic")
    with pytest.raises(UnsupportedModel, match=r"a context of 1024 tokens: .* give --context-length 512"):
        load_model(directory, "float32", "cpu")
    assert load_model(directory, "float32", "cpu", context_length=512).facts.context_length == 512


def test_more_positions_than_the_model_has_are_refused_before_it_is_loaded(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.ARCHITECTURES["llama-gqa-untied"], tmp_path / "mine")
    text = r"--context-length 513: the model mine holds 512 tokens at most, .* RoPE scaling written into"
    with pytest.raises(ContextTooLong, match=text):
        load_engine(tmp_path / "mine", dtype="float32", device="cpu", context_length=513)


def test_a_window_is_judged_by_the_context_that_is_set(tmp_path: Path) -> None:
    """A sequence that the window always holds is computed without one."""
    config = transformers.MistralConfig(**tiny_models.SHAPE, sliding_window=64)
    directory = tiny_models.save(config, tmp_path / "window")
    prompts = random_prompts((5, 40))
    assert outputs(engine_of(directory, 64), prompts, 12) == reference_greedy(directory, prompts, 12)


def test_a_step_beyond_the_context_that_is_set_is_refused(tmp_path: Path) -> None:
    engine = engine_of(tiny_models.save(PHI3, tmp_path / "phi3"), 48)
    worker = ShuffledWorker(engine)
    (prompt,) = random_prompts((60,))
    with pytest.raises(ValueError, match="in a model of 48 positions"):
        worker.run([worker.admit(prompt, 2)], chunk=64)


def test_what_peers_compare_tells_the_context(tmp_path: Path) -> None:
    directory = tiny_models.save(PHI3, tmp_path / "phi3")
    short, long = engine_of(directory).layout, engine_of(directory, 64).layout
    assert short != long == replace(short, context_length=64)
