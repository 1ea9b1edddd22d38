"""Is a model computed in our own way where that is proven, and only there?"""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from services.engine import decoder, told
from services.engine import engine as engine_module
from services.engine.decoder import Layer, RmsNorm
from services.engine.engine import Engine, load_engine
from services.engine.linears import FEW, Packed, Plain, linear_of, may_hold_twice
from tests.engine import tiny
from tests.engine.conftest import MakeEngine
from tests.engine.test_equals_reference import OUTPUT_TOKENS, random_prompts
from tests.engine.worker import Worker
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
)
Directory = Callable[[str], Path]
FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines


def load(directory: Path, dtype: str = "float32", *, twice: bool = False) -> Engine:
    return load_engine(
        directory,
        dtype=dtype,
        device="cpu",
        kv_cache_memory=2**21,
        threads=1,
        small_batch_weights=twice,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_models_of_the_common_anatomy_are_computed_in_our_way_and_others_by_the_library(
    tiny_dir: Directory, caplog: pytest.LogCaptureFixture, architecture: str, dtype: str
) -> None:
    caplog.set_level(logging.INFO)
    ours = architecture in OURS
    assert load(tiny_dir(architecture), dtype).model.taken_apart is ours
    said = [record.getMessage() for record in caplog.records]
    assert said == ([] if ours else ["the model library computes the steps: other parts than ours"])


@pytest.mark.parametrize("architecture", ["llama-gqa-untied", "qwen3-query-key-norm"])
def test_ours_and_the_librarys_tokens_are_the_same_where_all_kinds_of_rows_share_a_step(
    tiny_dir: Directory, tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Whole prompts, chunks behind a prefix, and single tokens of differing lengths, in scattered pages."""
    ours = tiny_engine(architecture)
    monkeypatch.setattr(engine_module, "hasten", lambda *_, **__: None)
    library = load(tiny_dir(architecture))
    assert (ours.model.taken_apart, library.model.taken_apart) == (True, False)
    outputs = []
    for engine, seed in ((ours, 3), (library, 4)):
        worker = Worker(engine, seed)
        tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts((1, 40, 5, 80, 23))]
        worker.run(tenants[:1], chunk=64)
        outputs.append(worker.run(tenants, chunk=24))
    assert outputs[0] == outputs[1]


def unrotated(self: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Any) -> None:
    compute(self, x, torch.ones_like(cos), torch.zeros_like(sin), step)


def rotated_the_other_way(
    self: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Any
) -> None:
    compute(self, x, cos, -sin, step)


def one_layer_for_all(self: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Any) -> None:
    self._index = 0
    compute(self, x, cos, sin, step)


def unscaled(self: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Any) -> None:
    self._scaling = 0.9 * tiny.SHAPE["head_dim"] ** -0.5
    compute(self, x, cos, sin, step)


def unweighted(self: RmsNorm, rows: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(rows, rows.shape[-1:], None, 0.5)


def not_numbers(self: RmsNorm, rows: torch.Tensor) -> torch.Tensor:
    return rows * float("nan")


def failing(self: RmsNorm, rows: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not on this device")


compute = decoder.Layer.__call__


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("part", "slip"),
    [
        (Layer, unrotated),
        (Layer, rotated_the_other_way),
        (Layer, one_layer_for_all),
        (Layer, unscaled),
        (RmsNorm, unweighted),
        (RmsNorm, not_numbers),
        (RmsNorm, failing),
    ],
    ids=lambda each: each.__name__,
)
def test_a_way_that_gives_something_else_is_not_used_and_the_log_says_so(
    tiny_dir: Directory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: type,
    slip: Callable[..., Any],
    dtype: str,
) -> None:
    monkeypatch.setattr(part, "__call__", slip)
    engine = load(tiny_dir("llama-gqa-untied"), dtype)
    assert not engine.model.taken_apart
    (said,) = caplog.records
    assert said.getMessage() == "the model library computes the steps: ours are not the same"
    assert said.levelno == logging.WARNING
    if dtype == "float32":
        (prompt,) = random_prompts((30,))
        worker = Worker(engine)
        outputs = worker.run([worker.admit(prompt, 8)], chunk=20)
        assert outputs == reference_greedy(tiny_dir("llama-gqa-untied"), [prompt], 8)


def test_weights_are_not_held_twice(tiny_dir: Directory) -> None:
    before = held()
    engine = load(tiny_dir("llama-gqa-untied"))
    assert engine.model.taken_apart
    weights = (tiny_dir("llama-gqa-untied") / "model.safetensors").stat().st_size
    assert weights * 0.8 < held() - before - engine.cache.length < weights * 1.2


def test_in_bfloat16_steps_of_a_few_rows_are_computed_in_float32_over_a_second_form_of_the_weights(
    tiny_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_dir("qwen2-biased")
    once, twice = load(directory, "bfloat16"), load(directory, "bfloat16", twice=True)
    assert load(directory, twice=True).model.taken_apart  # in float32 there is nothing to gain
    prompts = random_prompts((20, 33, 20, 9))
    few, same = (next_logits(engine, prompts[:FEW], monkeypatch) for engine in (twice, once))
    assert few.dtype == (torch.float32 if FBGEMM else torch.bfloat16)
    assert (few - same).norm() < 0.05 * same.norm()
    many = [next_logits(engine, prompts, monkeypatch) for engine in (twice, once)]
    assert many[0].dtype is torch.bfloat16
    assert many[0].equal(many[1])


def next_logits(engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Of one step that continues each prompt by the same token."""
    worker = Worker(engine)
    tenants = [worker.admit(prompt, 8) for prompt in prompts]
    worker.step(tenants, chunk=100)
    for tenant in tenants:
        tenant.sequence.output[:] = [5]
    seen: list[torch.Tensor] = []

    def noting(team: Any, drawer: int, logits: torch.Tensor, *rest: Any) -> Any:
        seen.append(logits)
        return told.draw(team, drawer, logits, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "draw", noting)
        worker.step(tenants, chunk=100)
    return seen[0]


def test_weights_that_half_precision_cannot_hold_are_held_once(tiny_dir: Directory) -> None:
    assert not may_hold_twice(torch.tensor([[1.0, 1e6]], dtype=torch.bfloat16))
    assert not may_hold_twice(torch.tensor([[1.0, float("nan")]], dtype=torch.bfloat16))
    assert not may_hold_twice(torch.tensor([[1.0, 2.0]]))
    assert may_hold_twice(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)) is FBGEMM


def held() -> int:
    """Bytes of all tensors that Python knows, memory that several share counted once."""
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
def test_packed_products_are_the_plain_ones_side_by_side(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(5)
    parts = [torch.nn.Linear(48, width, bias=biased).to(dtype) for width in (96, 32, 32)]
    rows = torch.randn(9, 64).to(dtype)[:, :48]
    with torch.inference_mode():
        fused = linear_of(parts)
        assert isinstance(fused, Packed | Plain)
        expected = torch.cat([part(rows) for part in parts], dim=1)
        torch.testing.assert_close(fused(rows), expected)


@pytest.mark.parametrize("rows", [1, 8, 200])
def test_the_norm_is_the_same_for_few_rows_and_for_many(rows: int) -> None:
    from services.engine.anatomy import Norm

    torch.manual_seed(5)
    weight, hidden = torch.randn(48), torch.randn(rows, 48) + 0.5
    expected = functional.rms_norm(hidden, (48,), weight, 1e-5)
    torch.testing.assert_close(RmsNorm(Norm(weight, 1e-5))(hidden), expected)
