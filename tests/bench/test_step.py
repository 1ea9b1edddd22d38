"""Tests of `python -m bench step`: a step beside the machine's limit, in both phases."""

from pathlib import Path
from typing import Any

import pytest

from baton.pages.layout import DTYPE_BYTES
from tests.bench.commands import bench
from tests.engine import tiny_models
from tests.engine.execution.compiled_kernels import MODELS, needs_kernel
from tests.process.structured import tiny_model

pytestmark = pytest.mark.bench


def step(directory: Path, *flags: str) -> dict[str, Any]:
    return bench("step", "--runs", "3", "--model", str(directory), "--context", "40", "--batch", "3", *flags)


@pytest.mark.parametrize(("phase", "limit"), [("decode", "read"), ("prefill", "products")])
def test_a_step_is_set_beside_its_limit(tmp_path: Path, phase: str, limit: str) -> None:
    told = step(tiny_models.saved("llama-gqa-untied", tmp_path), "--phase", phase)
    assert (told["benchmark"], told["phase"], told["batch"], told["context"]) == ("step", phase, 3, 40)
    assert told["ratio_of"] == ["step", limit]
    assert told["ratio"] > 0
    assert told["ratio_of_least"] > 0
    assert told["device"] == "cpu"
    assert set(told["median_ms"]) == set(told["least_ms"]) >= {"step", limit}
    if phase == "decode":
        shape, number_bytes = tiny_models.SHAPE, DTYPE_BYTES[told["dtype"]]
        token_bytes = (
            number_bytes * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        )
        assert told["read_bytes"] == told["weight_bytes"] + 3 * 41 * token_bytes
    else:
        assert told["gflop"] > 0
        assert told["large_product_gflop"] > 0


def test_rows_that_are_held_are_set_beside_rows_that_are_not(tmp_path: Path, demo_model_dir: Path) -> None:
    """One run of the benchmark measures constrained and unconstrained rows in alternation."""
    model = tiny_model(tmp_path, demo_model_dir)
    told = step(model, "--grammar", "json")
    assert told["held_ratio"] > 0
    assert set(told["median_ms"]) == {"step", "held", "read"}
    assert told["ratio_of"] == ["step", "read"]
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}')
    assert step(model, "--grammar", str(schema))["held_ratio"] > 0, "an answer may be over within the run"


def test_a_step_with_drafts_is_set_beside_one_without(tmp_path: Path) -> None:
    told = step(tiny_models.saved("llama-gqa-untied", tmp_path), "--drafts", "3")
    assert set(told["median_ms"]) == {"step", "drafts", "read"}
    assert told["drafts_ratio"] > 0


def test_a_profile_names_the_operators(tmp_path: Path) -> None:
    told = step(tiny_models.saved("llama-gqa-untied", tmp_path), "--profile")
    assert sum(told["profile_ms"].values()) > 0


@needs_kernel
def test_weights_are_codes_where_that_is_asked_for(tmp_path: Path) -> None:
    model = tiny_models.save(MODELS["three queries a head"], tmp_path)
    flags = "--dtype", "bfloat16", "--quantize"
    plain, codes = (step(model, *flags, how) for how in ("none", "int8"))
    assert (plain["quantize"], codes["quantize"]) == ("none", "int8")
    assert codes["weight_bytes"] < 0.56 * plain["weight_bytes"]


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_step_is_measured_on_a_gpu(tmp_path: Path, phase: str) -> None:
    told = step(
        tiny_models.saved("llama-gqa-untied", tmp_path), "--phase", phase, "--device", "cuda", "--profile"
    )
    assert told["device"] == "cuda:0"
    assert told["ratio"] > 0
    assert sum(told["profile_ms"].values()) > 0
