"""Tests that our decoder computes a model if it agrees with the definition, and only then."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import GraniteConfig, LlamaConfig, Ministral3Config

from baton.engine.execution import agreement, fused_decoder
from baton.engine.execution.agreement import relative_difference
from baton.engine.execution.attention_span import LayerAttention
from baton.engine.execution.fused_decoder import FusedDecoder, Layer, RmsNorm
from baton.engine.execution.linear_layers import fused_linear
from baton.engine.execution.model_structure import Norm
from baton.engine.loading import engine_loading as engine_module
from baton.engine.loading import runner_selection
from baton.engine.loading.engine_loading import load_engine
from baton.engine.loading.runner_selection import library_execution
from baton.engine.torch_engine import TorchEngine
from tests.engine import tiny_models
from tests.engine.conftest import MakeEngine
from tests.engine.executions import is_ours
from tests.engine.test_equals_reference import OUTPUT_TOKENS, random_prompts
from tests.inference.engine_worker import ShuffledWorker
from tests.oracle import reference_greedy

OURS = (
    "llama-gqa-untied",
    "llama-mha-tied",
    "qwen2-biased",
    "qwen3-query-key-norm",
    "mistral-no-window",
    "mistral-window-beyond-context",
    "llama-biased-two-kv-heads",
    "granite-own-scaling",
    "qwen3-yarn-by-the-vendors-recipe",
)
Directory = Callable[[str], Path]


def load(directory: Path, dtype: str = "float32") -> TorchEngine:
    return load_engine(directory, dtype=dtype, device="cpu", kv_cache_memory=2**21, threads=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_models_of_the_common_anatomy_are_computed_in_our_way_and_others_by_the_library(
    tiny_dir: Directory, caplog: pytest.LogCaptureFixture, architecture: str, dtype: str
) -> None:
    caplog.set_level(logging.INFO)
    ours = architecture in OURS
    assert is_ours(load(tiny_dir(architecture), dtype)) is ours
    said = [each.getMessage() for each in caplog.records if each.name.startswith("baton.")]
    assert said == ([] if ours else ["the model library computes the steps: other parts than ours"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_position_does_beside_turning_is_seen_where_it_begins_late(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    """Only the last positions of the context differ from the common structure, so the check has to look at
    those."""
    caplog.set_level(logging.INFO)
    ministral = tiny_models.ARCHITECTURES["ministral3-queries-longer-by-position"].to_dict()
    early = tiny_models.CONTEXT - 4
    ministral["rope_parameters"] |= {
        "original_max_position_embeddings": early,
        "factor": tiny_models.CONTEXT / early,
    }
    directory = tiny_models.save(Ministral3Config(**ministral), tmp_path / "late")
    assert not is_ours(load(directory, dtype))
    (said,) = caplog.records
    found = said.__dict__["baton_fields"]["found"]
    assert found == "queries or keys that their position does more to than turn them"


@pytest.mark.parametrize("architecture", ["llama-gqa-untied", "qwen3-query-key-norm"])
def test_ours_and_the_librarys_tokens_are_the_same_where_all_kinds_of_rows_share_a_step(
    tiny_dir: Directory, tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Whole prompts, chunks behind a prefix, and single tokens of differing lengths, in scattered pages."""
    ours = tiny_engine(architecture)
    monkeypatch.setattr(engine_module, "select_execution", lambda model, *_: library_execution(model))
    library = load(tiny_dir(architecture))
    assert (is_ours(ours), is_ours(library)) == (True, False)
    outputs = []
    for engine, seed in ((ours, 3), (library, 4)):
        worker = ShuffledWorker(engine, seed)
        tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts((1, 40, 5, 80, 23))]
        worker.run(tenants[:1], chunk=64)
        outputs.append(worker.run(tenants, chunk=24))
    assert outputs[0] == outputs[1]


def test_in_bfloat16_ours_is_nearer_to_float32_than_the_librarys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = LlamaConfig(**{**tiny_models.SHAPE, "num_hidden_layers": 24, "initializer_range": 0.1})
    directory = tiny_models.save(deep, tmp_path / "deep")
    gaps: list[float] = []

    def listening(seen: torch.Tensor, right: torch.Tensor) -> float:
        gaps.append(relative_difference(seen, right))
        return gaps[-1]

    monkeypatch.setattr(runner_selection, "relative_difference", listening)
    assert is_ours(load(directory, "bfloat16"))
    librarys, ours = gaps[: len(gaps) // 2], gaps[len(gaps) // 2 :]
    assert len(librarys) == len(ours) > 1
    assert all(one < other for one, other in zip(ours, librarys, strict=True))
    assert sum(ours) < 0.9 * sum(librarys)


def test_what_rounding_takes_from_the_library_is_no_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that are wide apart make much of what is rounded. The same weights in float32 are far nearer."""
    sharp = GraniteConfig(**tiny_models.SHAPE, attention_multiplier=1.5)
    directory = tiny_models.save(sharp, tmp_path / "sharp")
    farthest: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for dtype, gaps in farthest.items():
        monkeypatch.setattr(
            runner_selection,
            "relative_difference",
            lambda *pair, gaps=gaps: gaps.append(relative_difference(*pair)) or gaps[-1],
        )
        assert is_ours(load(directory, dtype))
    assert max(farthest["float32"]) < agreement.TOLERANCES["float32"]
    assert max(farthest["bfloat16"]) > agreement.TOLERANCES["bfloat16"]


def unrotated(
    self: Layer, x: torch.Tensor, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Any
) -> torch.Tensor:
    return compute(self, x, normed, torch.ones_like(cos), torch.zeros_like(sin), step)


def rotated_the_other_way(
    self: Layer, x: torch.Tensor, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Any
) -> torch.Tensor:
    return compute(self, x, normed, cos, -sin, step)


def one_layer_for_all(self: Layer, *rest: Any) -> torch.Tensor:
    self._index = 0
    return compute(self, *rest)


def unscaled(self: Layer, *rest: Any) -> torch.Tensor:
    self._attention = LayerAttention(0.9 * tiny_models.SHAPE["head_dim"] ** -0.5)
    return compute(self, *rest)


def unweighted(self: RmsNorm, rows: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(rows, rows.shape[-1:], None, 0.5)


def not_numbers(self: RmsNorm, rows: torch.Tensor) -> torch.Tensor:
    return rows * float("nan")


def failing(self: RmsNorm, rows: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not on this device")


def not_added(self: RmsNorm, rows: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return add(self, rows.clone(), more)


def turned_no_further(
    self: FusedDecoder, tokens: torch.Tensor, positions: torch.Tensor, *rest: Any
) -> torch.Tensor:
    return logits(self, tokens, positions.clamp(max=tiny_models.CONTEXT - runner_selection.LONG - 1), *rest)


logits = FusedDecoder.logits
compute = fused_decoder.Layer.__call__
add = RmsNorm.of_sum
PLACES: dict[Callable[..., Any], str] = {not_added: "of_sum", turned_no_further: "logits"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (Layer, unrotated),
        (Layer, rotated_the_other_way),
        (Layer, one_layer_for_all),
        (Layer, unscaled),
        (FusedDecoder, turned_no_further),
        (RmsNorm, unweighted),
        (RmsNorm, not_numbers),
        (RmsNorm, failing),
        (RmsNorm, not_added),
    ],
    ids=lambda each: each.__name__,
)
def test_a_way_that_gives_something_else_is_not_used_and_the_log_says_so(
    tiny_dir: Directory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: type,
    wrong: Callable[..., Any],
    dtype: str,
) -> None:
    monkeypatch.setattr(part, PLACES.get(wrong, "__call__"), wrong)
    engine = load(tiny_dir("llama-gqa-untied"), dtype)
    assert not is_ours(engine)
    (said,) = caplog.records
    assert said.getMessage() == "the model library computes the steps: ours are not the same"
    assert said.levelno == logging.WARNING
    if dtype == "float32":
        (prompt,) = random_prompts((30,))
        worker = ShuffledWorker(engine)
        outputs = worker.run([worker.admit(prompt, 8)], chunk=20)
        assert outputs == reference_greedy(tiny_dir("llama-gqa-untied"), [prompt], 8)


def test_weights_are_not_held_twice(tiny_dir: Directory) -> None:
    before = held()
    engine = load(tiny_dir("llama-gqa-untied"))
    assert is_ours(engine)
    weights = (tiny_dir("llama-gqa-untied") / "model.safetensors").stat().st_size
    assert weights * 0.8 < held() - before - engine.cache.length < weights * 1.2


def held() -> int:
    """Return the bytes of all tensors that Python knows. Shared memory counts once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    packed: int = sum(each.numel() * each.element_size() for each in tensors if each.is_mkldnn)
    plain = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tensors
        if each.layout is torch.strided and each.device.type == "cpu"
    }
    return packed + int(sum(plain.values()))


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "biased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 9])
def test_packed_products_are_the_plain_ones_side_by_side(
    dtype: torch.dtype, count: int, *, biased: bool
) -> None:
    torch.manual_seed(5)
    parts = [torch.nn.Linear(48, width, bias=biased).to(dtype) for width in (96, 32, 32)]
    rows = torch.randn(count, 64).to(dtype)[:, :48]
    with torch.inference_mode():
        fused = fused_linear(parts)
        expected = torch.cat([part(rows) for part in parts], dim=1)
        torch.testing.assert_close(fused(rows), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 200])
def test_the_norm_is_the_same_for_few_rows_and_for_many_and_of_a_sum(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    weight, hidden, more = torch.randn(48), torch.randn(rows, 48) + 0.5, torch.randn(rows, 48)
    weight, hidden, more = weight.to(dtype), hidden.to(dtype), more.to(dtype)
    rtol, atol = (1e-5, 1e-5) if dtype is torch.float32 else (2**-7, 1e-3)

    def right(of: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(of.float(), (48,), weight.float(), 1e-5).to(dtype)

    norm = RmsNorm(Norm(weight, 1e-5))
    torch.testing.assert_close(norm(hidden), right(hidden), rtol=rtol, atol=atol)
    residuals = hidden.float()
    total = residuals + more
    torch.testing.assert_close(norm.of_sum(residuals, more), right(total), rtol=rtol, atol=atol)
    torch.testing.assert_close(residuals, total)
    heads = torch.randn(rows, 3, 64).to(dtype)[:, 1:, :48]
    torch.testing.assert_close(norm(heads), right(heads), rtol=rtol, atol=atol)
