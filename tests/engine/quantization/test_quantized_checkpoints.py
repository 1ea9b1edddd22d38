"""Tests that a quantized checkpoint is loaded as the numbers that it stands for, by one rank and by two."""

import gc
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.engine.loading.engine_loading import load_engine
from baton.engine.loading.model_loading import load_model
from baton.engine.loading.weight_files import StoredTensor, weights_in
from baton.engine.loading.weight_mapping import Box
from baton.engine.quantization import packed_weights
from baton.engine.quantization.packed_weights import numbers_of
from baton.engine.quantization.weight_formats import Mxfp4Experts, ScaledWeight
from baton.inference.collectives import LocalCollectives
from baton.models.checkpoint_quantization import read_quantization
from baton.models.model_facts import ModelUnreadable, UnsupportedModel
from baton.topology import Topology
from tests.engine import tiny_models
from tests.engine.peak_memory import Counted
from tests.engine.quantization.quantized_files import (
    BLOCK,
    FORMATS,
    MIXED,
    MXFP4,
    PT,
    Format,
    expert_by_expert,
    in_blocks,
    mxfp4,
    write,
)
from tests.engine.test_equals_reference import random_prompts
from tests.inference.engine_worker import ShuffledWorker
from tests.models.recipes import recipe, save
from tests.oracle import reference_greedy

SHAPE: Final[dict[str, Any]] = {
    **tiny_models.SHAPE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA: Final = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False)
MIXTURE: Final = transformers.Qwen3MoeConfig(
    **SHAPE, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
)
OUTPUT_TOKENS: Final = 12
STRIPS: Final = 5
"""Most strips of a weight in memory while it is computed: codes, scales and numbers of the same rows."""
TALL: Final = (4000, 64)
"""Shape of a weight with many rows for one strip."""
STRIP: Final = 64 * 64
BLOCKS, PACKED = FORMATS["FP8 in blocks (Qwen3-FP8, DeepSeek V3, MiniMax M2)"], FORMATS["AWQ"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(LLAMA, tmp_path_factory.mktemp("plain") / "llama")


def weights_of(directory: Path, dtype: str = "float32", ranks: int = 1, rank: int = 0) -> dict[str, Any]:
    model = load_model(directory, dtype, "cpu", LocalCollectives(Topology(ranks), rank))
    weights: dict[str, Any] = model.module.state_dict()
    return weights


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loaded_checkpoint_is_not_mapped_any_more(llama: Path, tmp_path: Path, compiled: bool) -> None:
    """One tensor that is a view of the mapped file would keep all its pages in memory."""
    quantised, _ = write(llama, tmp_path, BLOCKS)
    engine = load_engine(quantised, dtype="float32", device="cpu", kv_cache_memory=2**22, compiled=compiled)
    gc.collect()
    assert str(quantised) not in Path("/proc/self/maps").read_text()
    assert engine.vocab_size == tiny_models.VOCABULARY


def parts_of(weight: torch.Tensor) -> list[Box]:
    """Return parts of each dimension: all of it, halves, and pieces that begin and end anywhere."""
    whole = tuple(map(range, weight.shape))
    parts = [whole]
    for dim, size in enumerate(weight.shape):
        some = (range(size // 2), range(size // 3, size * 6 // 7))
        parts += [(*whole[:dim], part, *whole[dim + 1 :]) for part in some]
    return parts


def part_of(weight: torch.Tensor, part: Box) -> torch.Tensor:
    return weight[tuple(slice(each.start, each.stop) for each in part)]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    unlike = [name for name, each in one.items() if not torch.equal(each, other[name])]
    assert unlike == []


@pytest.mark.parametrize("form", FORMATS)
def test_a_released_format_is_read_as_what_it_stands_for(llama: Path, tmp_path: Path, form: str) -> None:
    """A weight is read whole, and as a rank reads it: any range of rows or columns, whatever the blocks
    are."""
    quantised, meant = write(llama, tmp_path, FORMATS[form])
    how, numbers = read_quantization(quantised), load_file(meant / "model.safetensors")
    assert how is not None
    for dtype in (torch.float32, torch.bfloat16):
        with weights_in(quantised, how, dtype) as weights:
            for name, each in numbers.items():
                assert weights.shape(name) == each.shape
                for part in parts_of(each):
                    read = weights.read(name, part)
                    assert torch.equal(read.to(dtype), part_of(each, part).to(dtype)), (name, part)


@pytest.mark.parametrize("form", [BLOCKS, PACKED], ids=["FP8", "AWQ"])
def test_a_rank_has_its_part_of_what_it_stands_for(llama: Path, tmp_path: Path, form: Format) -> None:
    quantised, meant = write(llama, tmp_path, form)
    for rank in range(2):
        assert_same(weights_of(quantised, ranks=2, rank=rank), weights_of(meant, ranks=2, rank=rank))


@pytest.mark.parametrize("form", FORMATS)
def test_a_released_format_is_computed_as_the_library_computes_what_it_stands_for(
    llama: Path, tmp_path: Path, form: str
) -> None:
    quantised, meant = write(llama, tmp_path, FORMATS[form])
    engine = load_engine(quantised, dtype="float32", device="cpu", kv_cache_memory=2**20, threads=1)
    worker = ShuffledWorker(engine, seed=1)
    prompts = random_prompts((3, 20))
    answers = worker.run([worker.admit(prompt, OUTPUT_TOKENS) for prompt in prompts], chunk=7)
    assert answers == reference_greedy(meant, prompts, OUTPUT_TOKENS)


@pytest.mark.parametrize("form", [BLOCKS, PACKED], ids=["FP8", "AWQ"])
def test_experts_are_put_together_of_what_each_stands_for(tmp_path: Path, form: Format) -> None:
    """Each expert has its own weights in the files. The model library expects one tensor for all experts."""
    plain = tiny_models.save(MIXTURE, tmp_path / "plain")
    quantised, meant = write(plain, tmp_path, form)
    assert any(".experts.3." in name for name in load_file(quantised / "model.safetensors"))
    for ranks in (1, 2):
        assert_same(weights_of(quantised, ranks=ranks), weights_of(meant, ranks=ranks))


IN_ORDER: Final = [form for form in FORMATS if "order of activations" not in form]
"""Formats whose groups are neighbouring columns. Of the others all columns are read."""


@pytest.mark.parametrize("form", IN_ORDER)
def test_of_some_columns_their_blocks_and_groups_are_read(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    quantised, meant = write(llama, tmp_path, FORMATS[form])
    name = "model.layers.0.mlp.down_proj.weight"
    weight, read = load_file(meant / "model.safetensors")[name], [0]
    for way in ("rows", "columns", "part"):
        there = getattr(StoredTensor, way)

        def counting(tensor: StoredTensor, *where: Any, there: Any = there) -> torch.Tensor:
            part: torch.Tensor = there(tensor, *where)
            read[0] += part.nbytes
            return part

        monkeypatch.setattr(StoredTensor, way, counting)
    with weights_in(quantised, read_quantization(quantised), torch.float32) as weights:
        took = []
        for columns in (range(weight.shape[1]), range(48)):
            read[0] = 0
            weights.read(name, (range(weight.shape[0]), columns))
            took.append(read[0])
    assert took[1] <= 0.6 * took[0]


@pytest.mark.parametrize("strip", [1, 500])
@pytest.mark.parametrize("form", FORMATS)
def test_in_whichever_strips_a_weight_is_computed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, strip: int
) -> None:
    monkeypatch.setattr(packed_weights, "STRIP", strip)
    quantised, meant = write(llama, tmp_path, FORMATS[form])
    name = "model.layers.0.mlp.down_proj.weight"
    weight = load_file(meant / "model.safetensors")[name]
    with weights_in(quantised, read_quantization(quantised), torch.float32) as weights:
        for part in parts_of(weight):
            assert torch.equal(weights.read(name, part), part_of(weight, part))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "prefix"), [("llama4", "language_model."), ("qwen3_vl_moe", "")])
def test_experts_are_joined_that_lie_one_by_one_in_quantised_releases_alone(
    tmp_path: Path, kind: str, prefix: str, ranks: int
) -> None:
    """Llama 4's experts are transposed in addition, and their names have the prefix of the model's
    container."""
    plain = save(recipe(kind), tmp_path / "plain")
    quantised, meant = write(plain, tmp_path, expert_by_expert(turned=kind == "llama4"))
    file = quantised / "model.safetensors"
    assert any(".experts.3.up_proj." in name for name in load_file(file))
    save_file({f"{prefix}{name}": each for name, each in load_file(file).items()}, file, PT)
    assert_same(weights_of(quantised, ranks=ranks), weights_of(meant, ranks=ranks))


def test_gpt_oss_is_computed_as_the_library_computes_what_it_stands_for(tmp_path: Path) -> None:
    """The experts of gpt-oss are in MXFP4, under tensor names that no other model has."""
    shape = {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    plain = tiny_models.save(transformers.GptOssConfig(**shape), tmp_path / "plain")
    quantised, meant = write(plain, tmp_path, MXFP4)
    for ranks in (1, 2):
        assert_same(weights_of(quantised, ranks=ranks), weights_of(meant, ranks=ranks))
    engine = load_engine(quantised, dtype="float32", device="cpu", kv_cache_memory=2**20, threads=1)
    worker, prompts = ShuffledWorker(engine, seed=1), random_prompts((3, 20))
    answers = worker.run([worker.admit(prompt, OUTPUT_TOKENS) for prompt in prompts], chunk=7)
    assert answers == reference_greedy(meant, prompts, OUTPUT_TOKENS)


class Held:
    """A tensor in memory as one of a file."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.shape = tuple(values.shape)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self._values[start:stop]

    def columns(self, start: int, stop: int) -> torch.Tensor:
        return self._values[:, start:stop]

    def whole(self) -> torch.Tensor:
        return self._values

    def part(self, box: Sequence[range]) -> torch.Tensor:
        return self._values[tuple(slice(each.start, each.stop) for each in box)]


def test_mxfp4_is_what_the_library_makes_of_it() -> None:
    """The experts of gpt-oss."""
    weight = torch.randn(3, 64, 48, generator=torch.Generator().manual_seed(4))
    blocks, scales, meant = mxfp4(weight)
    ours = Mxfp4Experts(Held(blocks), Held(scales))
    assert ours.shape == (3, 64, 48)
    assert torch.equal(numbers_of(ours, torch.float32), meant)
    assert torch.equal(
        numbers_of(ours, torch.float32), convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    )
    assert torch.equal(numbers_of(ours, torch.bfloat16), convert_moe_packed_tensors(blocks, scales))
    assert torch.equal(
        numbers_of(ours, torch.float32, (range(1, 3), range(10, 20), range(5, 48))), meant[1:3, 10:20, 5:]
    )


def test_fp8_is_what_the_library_makes_of_it() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(4))
    tensors, _ = in_blocks(32, 16)("x", weight)
    codes, scales = tensors["x.weight"], tensors["x.weight_scale_inv"]
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=torch.float32)
    assert torch.equal(numbers_of(ScaledWeight(Held(codes), Held(scales), (32, 16)), torch.float32), theirs)


def test_scales_that_are_exponents_alone() -> None:
    codes = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[126], [130]], dtype=torch.uint8)
    numbers = numbers_of(ScaledWeight(Held(codes), Held(scales)), torch.float32)
    assert numbers.tolist() == [[0.5, 1.0], [24.0, 32.0]]


def test_experts_of_one_tensor_are_scaled_each_by_its_own() -> None:
    """[expert, out, in], as some checkpoints are stacked."""
    codes = torch.arange(24.0).reshape(2, 3, 4).to(torch.float8_e4m3fn)
    scales = torch.tensor([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]])
    assert torch.equal(
        numbers_of(ScaledWeight(Held(codes), Held(scales)), torch.float32), codes.float() * scales
    )


def test_both_sizes_are_told_and_that_the_scheme_of_the_cache_is_not_used(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form = FORMATS["FP8 of compressed-tensors, by row (…-FP8-dynamic)"]
    quantised, _ = write(llama, tmp_path, form)
    with caplog.at_level(logging.INFO):
        load_model(quantised, "bfloat16", "cpu")
    told = [
        record for record in caplog.records if record.name.startswith("baton.engine.loading.model_loading")
    ]
    texts = [record.getMessage() for record in told]
    file_bytes = (quantised / "model.safetensors").stat().st_size
    numbers = sum(each.numel() for each in load_file(llama / "model.safetensors").values())
    assert "weights are dequantised as they are loaded" in texts[0]
    assert "the checkpoint's scheme for its KV cache is passed over" in texts[1]
    fields = vars(told[0])["baton_fields"]
    assert fields == {"method": "compressed-tensors", "file_bytes": file_bytes, "bytes": 2 * numbers}


@pytest.mark.parametrize("form", FORMATS)
def test_beside_a_weight_strips_are_held_while_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The number of strips does not depend on the weight's size."""
    monkeypatch.setattr(packed_weights, "STRIP", STRIP)
    tensors, meant = FORMATS[form].quantise(
        "x", torch.randn(TALL, generator=torch.Generator().manual_seed(4))
    )
    save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / "model.safetensors", PT)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FORMATS[form].config}))
    with weights_in(tmp_path, read_quantization(tmp_path), torch.float32) as weights:
        packed = weights.table.packed["x.weight"]
        with Counted() as counted:
            numbers = numbers_of(packed, torch.float32)
    assert torch.equal(numbers, meant)
    assert numbers.nbytes <= counted.most <= numbers.nbytes + STRIPS * 4 * STRIP


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", [BLOCKS, PACKED], ids=["FP8", "AWQ"])
def test_a_quantised_model_takes_its_weights_and_no_other_beside_them_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Format, ranks: int
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # in one thread, which is counted
    monkeypatch.setattr(packed_weights, "STRIP", STRIP)
    shape = {**SHAPE, "intermediate_size": 400, "num_hidden_layers": 6}
    plain = tiny_models.save(transformers.LlamaConfig(**shape, tie_word_embeddings=False), tmp_path / "plain")
    quantised, _ = write(plain, tmp_path, form)
    with Counted() as counted:
        weights = weights_of(quantised, ranks=ranks)
    held = sum(each.nbytes for each in weights.values())
    largest = max(each.nbytes for each in weights.values())
    together = max(STRIP, 400 * max(BLOCK[0], 8))  # numbers of the rows that share scales
    assert held <= counted.most <= held + largest + STRIPS * 4 * together


def in_config(directory: Path, quantisation: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantisation}))
    return directory


@pytest.mark.parametrize(
    ("quantisation", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "weights quantised by bitsandbytes"),
        ({"quant_method": "aqlm"}, "weights quantised by aqlm"),
        ({"bits": 4}, "weights quantised by an unnamed method"),
        ({"quant_method": "gptq", "bits": 3}, "by gptq of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "by awq in the version gemv"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "by fp8 in e5m2"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "by modelopt with W4A8_AWQ"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, "marlin-24"),
        (
            {**FORMATS["int4 of compressed-tensors (Kimi K2)"].config, "transform_config": {"R1": {}}},
            "by compressed-tensors with transforms",
        ),
    ],
    ids=str,
)
def test_what_nothing_dequantises_is_refused_by_name_with_what_would_help(
    llama: Path, tmp_path: Path, quantisation: dict[str, Any], words: str
) -> None:
    quantised, _ = write(llama, tmp_path, replace(BLOCKS, config=quantisation))
    with pytest.raises(UnsupportedModel, match=rf"it needs .*{words}.*take the release in bfloat16"):
        load_model(quantised, "float32", "cpu")


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ("re:.*_norm", "of the groups of its quantization_config none has model.layers.0.mlp.gate_proj"),
        ("re:*", r"the target re:\* of its quantization_config is no pattern: nothing to repeat"),
    ],
)
def test_a_module_of_which_no_group_is_told_is_named(
    llama: Path, tmp_path: Path, targets: str, words: str
) -> None:
    form = FORMATS["FP8 and int4 of compressed-tensors, by module"]
    groups = {**MIXED, "rest": {**MIXED["rest"], "targets": [targets]}}
    quantised, _ = write(llama, tmp_path, replace(form, config={**form.config, "config_groups": groups}))
    with pytest.raises(ModelUnreadable, match=words):
        load_model(quantised, "float32", "cpu")


def test_integers_of_another_width_than_is_told_are_not_read(llama: Path, tmp_path: Path) -> None:
    form = FORMATS["int8 of compressed-tensors, packed (…-w8a16)"]
    told = FORMATS["int4 of compressed-tensors (Kimi K2)"].config
    quantised, _ = write(llama, tmp_path, replace(form, config=told))
    with pytest.raises(ModelUnreadable, match=r"\d+ words a row for \d+ integers of 4 bits"):
        load_model(quantised, "float32", "cpu")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lost", ["config", "scales"])
def test_codes_are_never_taken_for_numbers(llama: Path, tmp_path: Path, lost: str, ranks: int) -> None:
    """The settings that identify codes may be missing."""
    quantised, _ = write(llama, tmp_path, BLOCKS)
    if lost == "config":
        in_config(quantised, None)
    else:
        file = quantised / "model.safetensors"
        save_file({k: v for k, v in load_file(file).items() if not k.endswith("_inv")}, file, PT)
    with pytest.raises(ModelUnreadable, match=r"_proj\.weight holds codes \(F8_E4M3\), and neither"):
        load_model(quantised, "float32", "cpu", LocalCollectives(Topology(ranks), 0))


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        (BLOCKS, lambda end, each: each[:1] if end == "weight_scale_inv" else each, "scales of the shape"),
        (PACKED, lambda end, each: None if end == "qzeros" else each, r"the files lack .*\.qzeros, part of"),
        (PACKED, lambda end, each: each[:, :-1] if end == "qweight" else each, "has the shape|does not fit"),
        (PACKED, lambda end, each: each[:3] if end == "scales" else each, "3 groups of "),
    ],
    ids=["scales", "zero points", "words", "groups"],
)
def test_parts_that_do_not_fit_each_other_are_named(
    llama: Path, tmp_path: Path, form: Format, change: Callable[[str, Any], Any], words: str
) -> None:
    quantised, _ = write(llama, tmp_path, form)
    file = quantised / "model.safetensors"
    changed = {name: change(name.rpartition(".")[2], each) for name, each in load_file(file).items()}
    save_file({name: each.contiguous() for name, each in changed.items() if each is not None}, file, PT)
    with pytest.raises(ModelUnreadable, match=words):
        load_model(quantised, "float32", "cpu")


def test_the_memory_that_is_checked_is_what_the_weights_become(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "baton.engine.loading.model_loading.memory_shortage", lambda _, needed: asked.append(needed)
    )
    quantised, _ = write(llama, tmp_path, PACKED)
    load_model(quantised, "float32", "cpu")
    assert asked == [4 * sum(each.numel() for each in load_file(llama / "model.safetensors").values())]
