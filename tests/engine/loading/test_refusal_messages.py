"""Tests that errors for damaged or unknown models name the file, the value and the remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from baton.engine.gguf.convert import main
from baton.engine.loading.library_loading import check_library_version
from baton.engine.loading.model_loading import load_model
from baton.runtime.errors import StartupError
from tests.engine import tiny_models
from tests.engine.gguf.gguf_files import in_gguf, write

LIBRARY_S = (
    "above report",
    "out of date",
    "ignore_mismatched_sizes",
    "Unrecognized model",
    "with an attention of ours",
)
"""Words of the library or of internals, which do not help a user."""


def refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(StartupError) as error:
        load_model(directory, "float32", "cpu")
    line = str(error.value)
    assert "\n" not in line
    assert not any(each in line for each in LIBRARY_S)
    assert "REPORT" not in capsys.readouterr().err
    return line


@pytest.mark.parametrize("version", ["5.19.0", "5.23.4", "4.57.1"])
def test_a_library_that_is_too_old_for_this_engine_is_refused_with_the_version_that_it_needs(
    version: str,
) -> None:
    with pytest.raises(StartupError, match=rf"needs transformers 5\.24 or newer, and {version} is installed"):
        check_library_version(version)


@pytest.mark.parametrize("version", [transformers.__version__, "5.24.0.dev0", "6.0.1"])
def test_a_newer_library_is_not_refused(version: str) -> None:
    check_library_version(version)


@pytest.fixture
def llama(tiny_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a Llama checkpoint for a test to damage."""
    return Path(shutil.copytree(tiny_dir("llama-gqa-untied"), tmp_path / "llama"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"model_type": None}, "config.json: no model_type in it"),
        ({"model_type": "nonesuch"}, "it needs a definition of its type, which transformers "),
        ({"hidden_size": "48"}, "Field 'hidden_size' expected int, got str (value: '48')"),
        (
            {"num_attention_heads": 7, "head_dim": None},
            "hidden size (48) is not a multiple of the number of attention",
        ),
        (
            {"rope_parameters": {"rope_type": "nonesuch", "rope_theta": 1e4}},
            "its config.json names 'nonesuch', which the library does not have",
        ),
        ({"hidden_act": "nonesuch"}, "its config.json names 'nonesuch', which the library does not have"),
        ({"vocab_size": 140}, "the weight lm_head.weight has the shape [131, 48], not [140, 48]"),
        (
            {"model_type": "deepseek_v32"},
            "(deepseek_v32) cannot be served: it needs layers of type indexed_attention;",
        ),
    ],
)
def test_a_configuration_that_cannot_be_used(
    llama: Path, capsys: pytest.CaptureFixture[str], words: dict[str, Any], line: str
) -> None:
    config = json.loads((llama / "config.json").read_text()) | words
    (llama / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None or k != "model_type"})
    )
    assert line in refused(llama, capsys)


def test_weights_that_the_library_cannot_join_are_named(
    tiny_dir: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library's error refers to a report that it logs."""
    directory = Path(shutil.copytree(tiny_dir("qwen3-moe"), tmp_path / "experts"))
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    save_file(
        {**weights, name: weights[name][:-1].clone()}, directory / "model.safetensors", {"format": "pt"}
    )
    line = refused(directory, capsys)
    assert "model.layers.1.mlp.experts.gate_up_proj: stack expects each tensor to be equal size" in line


@pytest.mark.parametrize("named", [False, True])
def test_a_missing_pad_token_is_blamed_where_a_definition_failed_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: bool
) -> None:
    shape = {**tiny_models.SHAPE, "num_attention_heads": 4}
    if named:
        config = transformers.RobertaConfig(**shape, is_decoder=True)
    else:
        config = tiny_models.ARCHITECTURES["gpt2-learned-positions"]
    directory = tiny_models.save(config, tmp_path / "model")
    if not named:  # a table that is too short: it has no pad_token_id either
        words = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(
            json.dumps({**words, "max_seq_len": 64, "model_max_length": 600})
        )
    assert ("has no pad_token_id" in refused(directory, capsys)) == named


def test_a_gguf_file_whose_weights_have_other_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.LlamaConfig(**tiny_models.SHAPE, tie_word_embeddings=False)
    weights = load_file(tiny_models.save(config, tmp_path / "source") / "model.safetensors")
    file = write(
        tmp_path / "tiny.gguf", in_gguf(weights), shape={**tiny_models.SHAPE, "intermediate_size": 96}
    )
    assert main([str(file), str(tmp_path / "made")]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "the weight model.layers.0.mlp.down_proj.weight has the shape [48, 80], not [48, 96]"
