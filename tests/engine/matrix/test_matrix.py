"""Tests that every model type in the table equals `generate`, token for token."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from baton.engine.execution.attention_span import AttentionSpan
from baton.engine.loading.engine_loading import load_engine
from baton.engine.torch_engine import TorchEngine
from tests.engine import tiny_models
from tests.engine.executions import is_ours
from tests.engine.matrix.table import ALL, OWN, TYPES
from tests.models.comparison import prompts
from tests.models.trial import differences, generated

Loaded = Callable[[str], tuple[Path, TorchEngine]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    root = tmp_path_factory.mktemp("matrix")

    @cache
    def load(name: str) -> tuple[Path, TorchEngine]:
        directory = tiny_models.save(TYPES[name].make(), root / name.replace(" ", "-"))
        engine = load_engine(directory, dtype="float32", device="cpu", kv_cache_memory=2**24, threads=1)
        return directory, engine

    return load


def told(reach: AttentionSpan | None) -> str:
    return ALL if reach is None else f"{'chunk' if reach.in_chunks else 'window'} {reach.tokens}"


@pytest.mark.parametrize("name", TYPES)
def test_each_layer_is_seen_to_look_as_it_is_released(loaded: Loaded, name: str) -> None:
    entry, (_, engine) = TYPES[name], loaded(name)
    sights = [engine.model.attention[layer] for layer in engine.layout.layers]
    assert tuple(told(sight.span) for sight in sights) == entry.sees
    assert {sight.softcap is not None for sight in sights} == {"cap" in entry.on}
    assert {sight.sinks is not None for sight in sights} == {"sinks" in entry.on}
    assert is_ours(engine) is (entry.way == OWN)


@pytest.mark.parametrize("name", TYPES)
def test_tokens_are_those_of_generate(loaded: Loaded, name: str) -> None:
    """Alone and together, in long and short chunks, after a hand-over, and behind another's prefix."""
    directory, engine = loaded(name)
    assert not list(differences(engine, prompts(), generated(directory)))
