"""Tests that a quantized model computes what its codes stand for, and is refused where it cannot."""

import gc
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from baton.engine.execution import step_compiler
from baton.engine.execution.step_compiler import CODES, Build
from baton.engine.gguf.convert import main
from baton.engine.loading import model_loading
from baton.engine.quantization import quantized_weight
from baton.engine.quantization.quantized_weight import QuantizedWeight
from baton.engine.quantization.weight_quantization import WeightQuantization, quantize_model
from baton.engine.torch_engine import TorchEngine
from baton.inference.available_memory import Available
from baton.runtime.errors import StartupError
from baton.runtime.model_options import Quantize
from tests.engine import tiny_models
from tests.engine.execution.compiled_kernels import BUILDS, Directory, known, load, needs_kernel
from tests.engine.gguf.gguf_files import in_gguf, write
from tests.engine.quantization.test_quantized_weight import blocks_of
from tests.inference.engine_worker import ShuffledWorker
from tests.oracle import reference_greedy

SHAPE: Final[dict[str, Any]] = {
    **tiny_models.SHAPE,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
TYPES: Final = {
    "blk.0.attn_q": "Q4_0",
    "blk.0.attn_k": "Q8_0",
    "blk.0.attn_v": "Q6_K",
    "blk.0.attn_output": "Q4_1",
    "blk.0.ffn_gate": "Q4_K",
    "blk.0.ffn_up": "Q5_K",
    "blk.0.ffn_down": "Q6_K",
    "blk.1.attn_q": "Q4_0",
    "blk.1.attn_k": "Q4_0",
    "blk.1.attn_v": "Q4_0",
    "blk.1.attn_output": "Q5_0",
    "blk.1.ffn_gate": "Q4_K",
    "blk.1.ffn_up": "Q4_K",
    "blk.1.ffn_down": "Q5_1",
    "token_embd": "Q8_0",
}
"""Types with every form of codes in the kernel, and mixed forms."""
MADE: Final = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
"""Types to which the library quantizes."""
PROMPTS: Final = [
    [(7 * place + start) % tiny_models.VOCABULARY for place in range(length)]
    for start, length in ((1, 5), (3, 70))
]
NAME: Final = "three queries a head"


def gguf(folder: Path, types: Mapping[str, str] = TYPES) -> tuple[Path, Path]:
    """Return a GGUF file of weights in these types, and the directory converted from it."""
    config = LlamaConfig(**SHAPE, tie_word_embeddings=True)
    tensors = in_gguf(load_file(tiny_models.save(config, folder / "of") / "model.safetensors"), 4, 2)
    kinds = {f"{name}.weight": GGMLQuantizationType[kind] for name, kind in types.items()}
    for name, kind in kinds.items():
        if kind.name in MADE:
            numbers = quantize(tensors[name].numpy(), kind)
        else:
            numbers = blocks_of(kind, *tensors[name].shape)
        tensors[name] = torch.from_numpy(np.ascontiguousarray(numbers))
    file = write(folder / "tiny.gguf", tensors, shape=SHAPE, turned=64, types=kinds)
    assert main([str(file), str(folder / "made"), "tiny"]) == 0
    return file, folder / "made"


def greedy(engine: TorchEngine, count: int) -> list[list[int]]:
    worker = ShuffledWorker(engine)
    tenants = [worker.admit(prompt, count) for prompt in PROMPTS]
    while not all(tenant.done for tenant in tenants):
        worker.step(tenants, chunk=40)
    return [tenant.sequence.output for tenant in tenants]


def fields(caplog: pytest.LogCaptureFixture, message: str) -> dict[str, Any]:
    [found] = [vars(each)["baton_fields"] for each in caplog.records if each.getMessage() == message]
    return dict(found)


@needs_kernel
@pytest.mark.parametrize(
    "build",
    [
        name
        for name, build in BUILDS.items()
        if build.weights is CODES and build.numbers is torch.float32 and known(build)
    ],
    indirect=True,
)
def test_a_files_own_blocks_give_the_tokens_of_what_they_stand_for(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file, made = gguf(tmp_path)
    engine = load(made, dtype=torch.float32, quantization=WeightQuantization(Quantize.KEEP, file))
    for own, right in zip(greedy(engine, 24), reference_greedy(made, PROMPTS, 24), strict=True):
        assert own[: len(right)] == right  # which may end there
        assert len(right) > 8
    told = fields(caplog, "weights are kept as codes")
    assert set(told["weights"].split(", ")) == {
        *(f"1 kept {kind}" for kind in ("Q4_1", "Q5_K", "Q5_0", "Q5_1")),
        *("2 kept Q8_0", "2 kept Q6_K", "4 kept Q4_0", "3 kept Q4_K"),
    }


def test_memory_that_making_codes_takes_is_judged_before_the_load(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = directory(NAME)
    (file,) = place.glob("*.safetensors")
    left = Available(file.stat().st_size * 3 // 4 - 1, 2**60, "on this machine")
    monkeypatch.setattr(
        model_loading, "memory_shortage", lambda _, needed: left if left.size < needed else None
    )
    monkeypatch.setattr(model_loading, "load_definition", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(StartupError, match=r"takes at least .* bytes on cpu, and .* are available"):
        load(place, quantization=WeightQuantization(Quantize.INT8))


@needs_kernel
def test_codes_that_were_laid_out_for_the_kernel_are_freed(directory: Directory) -> None:
    engine = load(directory(NAME), quantization=WeightQuantization(Quantize.INT8))
    gc.collect()
    assert engine.model.quantized is not None
    assert not [each for each in gc.get_objects() if type(each) is QuantizedWeight]
    assert not engine.model.quantized


@needs_kernel
def test_what_a_file_has_no_kept_blocks_for_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    kinds = {name: kind for name, kind in TYPES.items() if name == "blk.0.attn_q"} | {"blk.1.attn_q": "Q2_K"}
    file, made = gguf(tmp_path, kinds)
    load(made, dtype=torch.bfloat16, quantization=WeightQuantization(Quantize.KEEP, file))
    told = fields(caplog, "weights are kept as codes")
    assert told["weights"] == "1 kept Q4_0, 13 int8 for F32, 1 int8 for Q2_K"


def test_a_file_without_kept_blocks_is_refused(tmp_path: Path) -> None:
    file, made = gguf(tmp_path, {})
    with pytest.raises(StartupError, match="--quantize keep: no weight of tiny is in blocks that"):
        load(made, quantization=WeightQuantization(Quantize.KEEP, file))


@needs_kernel
@pytest.mark.parametrize("how", [Quantize.INT8, Quantize.INT4])
def test_greedy_tokens_are_those_of_the_numbers_that_codes_stand_for(
    directory: Directory, tmp_path: Path, how: Quantize
) -> None:
    plain = directory(NAME)
    module = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        quantize_model("tiny", module, WeightQuantization(how))
    module.save_pretrained(tmp_path)
    right = reference_greedy(tmp_path, PROMPTS, 24)
    assert greedy(load(plain, dtype=torch.float32, quantization=WeightQuantization(how)), 24) == right
    widened = load(plain, dtype=torch.float32, quantization=WeightQuantization(how, multiplied=False))
    assert greedy(widened, 24) == right
    assert right != reference_greedy(plain, PROMPTS, 24)


@needs_kernel
def test_codes_take_a_half_or_a_third_of_the_bytes(directory: Directory) -> None:
    taken = {
        how: load(
            directory(NAME), quantization=None if how is Quantize.NONE else WeightQuantization(how)
        ).execution.weight_bytes
        for how in (Quantize.NONE, Quantize.INT8, Quantize.INT4)
    }
    assert taken[Quantize.INT8] < 0.56 * taken[Quantize.NONE]
    assert taken[Quantize.INT4] < 0.4 * taken[Quantize.NONE]


@needs_kernel
def test_pages_say_how_weights_are_kept(directory: Directory) -> None:
    ways = (WeightQuantization(Quantize.INT8), WeightQuantization(Quantize.INT8, multiplied=False), None)
    assert [load(directory(NAME), quantization=each).layout.quantize for each in ways] == [
        "int8",
        "int8",
        "none",
    ]


def refused(words: str, directory: Path, **how: Any) -> None:
    with pytest.raises(StartupError, match=words) as caught:
        load(directory, quantization=WeightQuantization(Quantize.INT8), **how)
    assert "\n" not in str(caught.value)


def test_a_model_that_is_no_gguf_file_has_no_blocks_to_keep(directory: Directory) -> None:
    with pytest.raises(
        StartupError, match=r"--quantize keep: the model is no GGUF file, .* give int8 or int4"
    ):
        load(directory(NAME), quantization=WeightQuantization(Quantize.KEEP))


def test_codes_without_compiled_steps_are_refused(directory: Directory) -> None:
    refused("--quantize int8: .* leave out --compiled-steps false", directory(NAME), compiled=False)


@needs_kernel
def test_a_model_or_pages_that_no_kernel_knows_are_refused(tiny_dir: Directory, directory: Directory) -> None:
    refused("a hidden size of 48", tiny_dir("llama-gqa-untied"))
    refused("GemmaTextScaledWordEmbedding", tiny_dir("gemma-one-kv-head"))
    refused("a page of 6", directory(NAME), page_tokens=6)


def test_a_machine_without_a_kernel_is_refused(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    refused("no kernel of torch.bfloat16 for this CPU; leave out --quantize", directory(NAME))


@needs_kernel
def test_a_machine_without_a_compiler_is_refused(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(step_compiler, "COMPILERS", ())
    step_compiler.kernel.cache_clear()
    refused("there is no C compiler", directory(NAME))
    step_compiler.kernel.cache_clear()


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_kernel_that_gives_something_else_is_refused(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """A small difference is refused, too: one scale in four that is a tenth too large."""
    found = quantized_weight.join_quantized

    def off(parts: Any) -> Any:
        side_by_side = found(parts)
        side_by_side.scale.view(-1)[::4] *= 1.1
        return side_by_side

    monkeypatch.setattr(quantized_weight, "join_quantized", off)
    refused("results differ by", directory(NAME), dtype=dtype)


def test_numbers_that_are_none_are_refused(directory: Directory, tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(directory(NAME), dtype=torch.float32)
    module.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("inf")
    module.save_pretrained(tmp_path)
    refused("the weight model.layers.1.mlp.up_proj cannot be kept as codes", tmp_path)
