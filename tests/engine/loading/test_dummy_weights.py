"""Tests of models with dummy weights: the same in every process, never mixed with real weights."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.loading.engine_loading import load_engine
from baton.engine.loading.weight_files import DummyWeights
from baton.engine.torch_engine import TorchEngine
from baton.models.model_facts import ModelNotFound, read_model
from baton.models.model_files import resolve
from baton.runtime.model_options import LoadFormat
from tests.engine.executions import is_ours
from tests.engine.test_equals_reference import random_prompts
from tests.inference.engine_worker import ShuffledWorker

TIED, UNTIED = "qwen2-biased", "llama-gqa-untied"


@pytest.fixture(params=[TIED, UNTIED])
def bare(request: pytest.FixtureRequest, tiny_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model directory without weights."""
    directory = tmp_path / "bare"
    shutil.copytree(tiny_dir(request.param), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    return directory


def engine(directory: Path) -> TorchEngine:
    return load_engine(
        directory, dtype="float32", load_format=LoadFormat.DUMMY, device="cpu", kv_cache_memory=4 * 2**20
    )


def test_two_processes_would_draw_the_same_tokens_in_our_own_way(bare: Path) -> None:
    outputs = []
    for _ in range(2):
        loaded = engine(bare)
        worker = ShuffledWorker(loaded)
        assert is_ours(loaded), "the library's definition agrees with ours on these numbers too"
        outputs.append(worker.run([worker.admit(prompt, 6) for prompt in random_prompts()], 64))
    assert outputs[0] == outputs[1]
    assert len({tuple(each) for each in outputs[0]}) > 1, "they depend on the prompt"


def test_a_rank_has_its_part_of_the_same_numbers() -> None:
    module = torch.nn.ModuleDict({"up": torch.nn.Linear(6, 8), "norm": torch.nn.LayerNorm(6)})
    dummies = DummyWeights(module, torch.device("cpu"))
    rows, columns = range(8), range(6)
    whole = dummies.read("up.weight", (rows, columns))
    assert torch.equal(dummies.read("up.weight", (range(2, 4), columns)), whole[2:4])
    assert torch.equal(dummies.read("up.weight", (rows, range(3, 6))), whole[:, 3:6])
    assert torch.equal(dummies.read("norm.weight", (columns,)), torch.ones(6))
    assert torch.equal(dummies.read("up.bias", (range(4, 8),)), torch.zeros(4))
    assert "up.weight" in dummies.names
    assert "inv_freq" not in dummies.names


def test_weights_are_needed_where_they_are_to_be_loaded(bare: Path) -> None:
    assert resolve(str(bare), LoadFormat.DUMMY).path == bare
    with pytest.raises(ModelNotFound, match="no safetensors weights"):
        resolve(str(bare))


def test_one_with_weights_is_another_model(tiny_dir: Callable[[str], Path], bare: Path) -> None:
    real = tiny_dir(UNTIED)
    assert read_model(real).fingerprint != read_model(real, dummy=True).fingerprint
    assert read_model(bare, dummy=True).fingerprint == read_model(bare, dummy=True).fingerprint
