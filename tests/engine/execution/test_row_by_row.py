"""Tests that a definition is computed row by row only if its cache is all that it needs."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding
from transformers.models.bloom.modeling_bloom import BloomMLP

from baton.engine.loading import library_loading, model_loading
from baton.engine.loading.capability_probes import COUNTING
from baton.engine.loading.model_loading import load_model
from baton.models.model_facts import UnsupportedModel
from tests.engine import tiny_models
from tests.engine.loading.test_refusals import BART

BLOOM = {
    "vocab_size": tiny_models.VOCABULARY,
    "hidden_size": 48,
    "n_layer": 2,
    "n_head": 4,
    "seq_length": 256,
}


def bloom(directory: Path) -> Path:
    return tiny_models.save(transformers.BloomConfig(**BLOOM, initializer_range=0.3), directory)


def test_biases_by_distance_are_the_definitions_own(tmp_path: Path) -> None:
    model = load_model(bloom(tmp_path / "bloom"), "float32", "cpu")
    assert model.definition is not None
    assert model.geometry.kv_heads == 4


@pytest.mark.parametrize(
    "make", [transformers.BloomConfig(**BLOOM), transformers.BartConfig(**BART)], ids=type
)
def test_what_was_loaded_with_our_attention_is_gone_before_it_is_loaded_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: transformers.PreTrainedConfig
) -> None:
    loaded: list[weakref.ref[torch.nn.Module]] = []
    there: list[int] = []

    def watched(*given: Any, **named: Any) -> Any:
        gc.collect()
        there.append(sum(each() is not None for each in loaded))
        module = load(*given, **named)
        loaded.append(weakref.ref(module))
        return module

    load = library_loading.load_definition
    monkeypatch.setattr(model_loading, "load_definition", watched)
    assert load_model(tiny_models.save(make, tmp_path / "model"), "float32", "cpu").definition
    assert len(there) == 2
    assert not any(there)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_probe_can_fail_positions_that_begin_anew_in_each_chunk_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    forward = BartLearnedPositionalEmbedding.forward

    def anew(table: Any, tokens: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        told: torch.Tensor = forward(table, tokens, 0)
        return told

    directory = tiny_models.save(transformers.BartConfig(**BART), tmp_path / "bart")
    monkeypatch.setattr(BartLearnedPositionalEmbedding, "forward", anew)
    with pytest.raises(UnsupportedModel, match=f"it needs {COUNTING};"):
        load_model(directory, dtype, "cpu")


def shifted(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def see(mlp: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return forward(mlp, x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1], *rest)

    return see


def test_probe_can_fail_tokens_that_see_others_outside_the_cache_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = bloom(tmp_path / "bloom")
    monkeypatch.setattr(BloomMLP, "forward", shifted(BloomMLP.forward))
    with pytest.raises(UnsupportedModel, match="it needs "):
        load_model(directory, "float32", "cpu")


def test_probe_can_fail_a_table_of_positions_that_is_shorter_than_the_context_is_refused(
    tmp_path: Path,
) -> None:
    directory = bloom(tmp_path / "bloom")
    assert load_model(directory, "float32", "cpu", context_length=64).facts.context_length == 64
    config = transformers.BartConfig(
        **{**BART, "max_position_embeddings": 64}, seq_length=64, model_max_length=300
    )
    with pytest.raises(UnsupportedModel, match="it needs "):
        load_model(tiny_models.save(config, tmp_path / "bart"), "float32", "cpu")
