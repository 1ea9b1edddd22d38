"""Tests that a GGUF file is converted completely, and refused if it would become another model."""

import tracemalloc
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quant_shape_to_byte_shape
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig

from baton.api.text.tokenizer import load_tokenizer
from baton.engine.gguf import gguf_file, text_splitting
from baton.engine.gguf.conversion_checks import Header, lost_of_tokenizer, lost_settings
from baton.engine.gguf.convert import main, read_tokenizer, write_tokenizer
from baton.engine.gguf.gguf_file import numbers_of, read
from baton.engine.loading.model_loading import load_model
from baton.models.model_facts import read_model
from tests.engine import tiny_models
from tests.engine.gguf.gguf_files import TOKENS, Tensors, Write, in_gguf, nothing, write

WIDE = 2**14
OBJECTS = 2**20
"""Bytes of Python objects."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """Return the weights of a Llama by the library's names."""
    config = LlamaConfig(**tiny_models.SHAPE, tie_word_embeddings=False)
    file = tiny_models.save(config, tmp_path_factory.mktemp("llama")) / "model.safetensors"
    found: Tensors = load_file(file)
    return found


def test_a_whole_file_is_converted_number_for_number(tmp_path: Path, weights: Tensors) -> None:
    file = write(tmp_path / "tiny.gguf", in_gguf(weights))
    assert main([str(file), str(tmp_path / "made"), "tiny"]) == 0
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert made.keys() == weights.keys()
    assert all(torch.equal(made[name], weight) for name, weight in weights.items())
    assert load_model(tmp_path / "made", "float32", "cpu").facts.name == "tiny"


@pytest.mark.parametrize("wide", [None, "model.norm.weight", "lm_head.weight"])
def test_numbers_that_are_all_of_bfloat16_are_kept_in_so_many_bytes(
    tmp_path: Path, weights: Tensors, wide: str | None
) -> None:
    """Two bytes per number do not become four, in memory or on disk. Nothing is rounded: one wider number
    keeps all of them wide."""
    narrow = {name: weight.bfloat16().float() for name, weight in weights.items()}
    if wide is not None:
        narrow[wide].view(-1)[3] = 1 + 2**-9
    file = write(tmp_path / "tiny.gguf", in_gguf({name: each.half() for name, each in narrow.items()}))
    assert main([str(file), str(tmp_path / "made"), "tiny"]) == 0
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert {each.dtype for each in made.values()} == {torch.bfloat16 if wide is None else torch.float32}
    assert all(torch.equal(each.float(), narrow[name].half().float()) for name, each in made.items())


@pytest.mark.parametrize(
    ("stored", "number"), [(GGMLQuantizationType.MXFP4, 0.75), (GGMLQuantizationType.Q8_0, 127.0)], ids=str
)
@pytest.mark.parametrize("more", [0.0, 1 / 3])
def test_numbers_of_bfloat16_are_kept_so_whatever_they_are_stored_as(
    tmp_path: Path, weights: Tensors, stored: GGMLQuantizationType, number: float, more: float
) -> None:
    """The cases are codes and scales that give bfloat16 numbers, and others that do not."""
    narrow = {name: weight.bfloat16().float() for name, weight in weights.items()}
    name = "model.layers.1.self_attn.o_proj.weight"  # the one kind with rows of whole blocks
    narrow |= {each: torch.full_like(narrow[each], number) for each in narrow if "o_proj" in each}
    if stored is GGMLQuantizationType.Q8_0:
        narrow[name][:, 0] += more
    else:
        narrow["model.norm.weight"][0] += more
    file = write(tmp_path / "tiny.gguf", in_gguf(narrow), stored=stored)
    assert main([str(file), str(tmp_path / "made"), "tiny"]) == 0
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert {each.dtype for each in made.values()} == {torch.float32 if more else torch.bfloat16}
    assert torch.allclose(made[name].float(), narrow[name], rtol=1e-2)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q6_K"])
def test_beside_a_tensor_a_strip_is_held_while_its_numbers_are_made(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(gguf_file, "STRIP", 2**12)
    stored, bytes_of_row = (
        GGMLQuantizationType[kind],
        quant_shape_to_byte_shape((256,), GGMLQuantizationType[kind]),
    )
    codes = np.random.default_rng(4).integers(0, 100, (4000, *bytes_of_row), dtype=np.uint8)
    data = codes.view(np.float16) if kind == "F16" else codes
    tracemalloc.start()
    numbers = numbers_of(data, stored)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(numbers, dequantize(data, stored), equal_nan=True)
    assert numbers.nbytes <= most < 1.1 * numbers.nbytes


def test_a_file_is_read_once_and_takes_what_is_made_of_it_and_one_tensor_more(
    tmp_path: Path, weights: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    begun = GGUFReader.__init__

    def counted(reader: GGUFReader, path: Path) -> None:
        reads.append(path)
        begun(reader, path)

    monkeypatch.setattr(GGUFReader, "__init__", counted)
    numbers = torch.Generator().manual_seed(4)
    wide = {
        name: torch.randn([WIDE if each == 80 else each for each in weight.shape], generator=numbers)
        for name, weight in weights.items()
    }
    stored, shape = GGMLQuantizationType.Q8_0, tiny_models.SHAPE | {"intermediate_size": WIDE}
    for name in ("first", "second"):  # what the library imports and keeps is there by the second
        file = write(tmp_path / f"{name}.gguf", in_gguf(wide), shape=shape, stored=stored)
        reads.clear()
        tracemalloc.start()
        assert main([str(file), str(tmp_path / name), "tiny"]) == 0
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    made = [each.nbytes for each in load_file(tmp_path / "second" / "model.safetensors").values()]
    assert len(reads) == 1
    assert {type(part) for field in read(file).fields.values() for part in field.parts} == {np.ndarray}
    assert sum(made) <= most <= sum(made) + max(made) + OBJECTS


def scaled(kind: str, factor: float) -> Write:
    def add(writer: GGUFWriter) -> None:
        writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(factor)

    return add


def windowed(tokens: int) -> Write:
    return lambda writer: writer.add_sliding_window(tokens)


def frequencies(divisor: float) -> Tensors:
    return {"rope_freqs.weight": torch.tensor([1.0] * 6 + [divisor] * 2)}


def refusal(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    made = file.parent / "made"
    assert main([str(file), str(made)]) == 1
    assert not made.exists()
    return capsys.readouterr().err.splitlines()[-1]


REFUSED: Final[list[tuple[Tensors, Write, str]]] = [
    (
        {},
        scaled("yarn", 4.0),
        "passes over what the model needs: llama.rope.scaling.type (yarn), llama.rope.scaling.factor (4)",
    ),
    ({}, scaled("linear", 2.0), "llama.rope.scaling.type (linear), llama.rope.scaling.factor (2)"),
    ({}, lambda writer: writer.add_rope_scaling_factor(8.0), "needs: llama.rope.scaling.factor (8)"),
    (frequencies(8.0), nothing, "RoPE scaling (Llama 3's, rope_freqs)"),
    ({"rope_factors_long.weight": torch.ones(8)}, nothing, "RoPE scaling (longrope)"),
    ({}, windowed(64), "needs: llama.attention.sliding_window (64)"),
    (frequencies(8.0), windowed(64), "rope_freqs), llama.attention.sliding_window (64)"),
    ({"blk.0.attn_q.bias": torch.ones(96)}, nothing, "LlamaForCausalLM has no place: blk.0.attn_q.bias"),
]


@pytest.mark.parametrize(("more", "add", "message"), REFUSED, ids=[each[2] for each in REFUSED])
def test_a_file_of_which_the_library_passes_over_a_part_is_refused_in_one_line(
    tmp_path: Path,
    weights: Tensors,
    capsys: pytest.CaptureFixture[str],
    more: Tensors,
    add: Write,
    message: str,
) -> None:
    file = write(tmp_path / "tiny.gguf", {**in_gguf(weights), **more}, add)
    assert refusal(file, capsys).endswith(message)


def test_rotations_that_the_librarys_names_for_an_architecture_leave_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "tiny.gguf", {}, kind="phi3", turned=4)
    assert refusal(file, capsys).endswith("passes over what the model needs: phi3.rope.dimension_count (4)")


def test_weights_that_the_library_would_make_up_are_refused(
    tmp_path: Path, weights: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has the weights of experts under the architecture of a model without any."""
    whole = in_gguf(weights)
    experts = {
        name.replace(".weight", "_exps.weight") if ".ffn_" in name and "norm" not in name else name: tensor
        for name, tensor in whole.items()
    }
    said = refusal(write(tmp_path / "tiny.gguf", experts), capsys)
    first = "model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.gate_proj.weight"
    assert said.startswith(f"there are weights which LlamaForCausalLM has and the file lacks: {first}, ")
    assert said.endswith(" and 6 more")


@pytest.mark.parametrize(
    ("more", "add"),
    [
        ({}, scaled("none", 0.0)),
        ({}, scaled("linear", 1.0)),
        ({}, lambda writer: writer.add_rope_scaling_orig_ctx_len(64)),
        ({}, windowed(tiny_models.CONTEXT)),
        (frequencies(1.0), nothing),
    ],
    ids=["none", "by one", "of no type", "beyond the context", "divided by one"],
)
def test_what_changes_nothing_is_not_refused(
    tmp_path: Path, weights: Tensors, more: Tensors, add: Write
) -> None:
    file = write(tmp_path / "tiny.gguf", {**in_gguf(weights), **more}, add)
    assert main([str(file), str(tmp_path / "made")]) == 0


def test_what_the_configuration_carries_is_not_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", frequencies(8.0), scaled("yarn", 4.0))
    turns = {"rope_theta": 10_000.0, "factor": 4.0}
    header, config = Header(GGUFReader(file)), LlamaConfig(**tiny_models.SHAPE)
    config.rope_parameters = {"rope_type": "yarn", **turns}
    assert lost_settings(header, config) == ["RoPE scaling (Llama 3's, rope_freqs)"]
    config.rope_parameters = {
        "one": {"rope_type": "yarn", **turns},
        "other": {"rope_type": "llama3", **turns},
    }
    assert lost_settings(header, config) == []


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("gpt-2", ["x", "ĠĠ", "Ġ12", "Ġ=", "Ġ345"]),
        ("exaone4", ["x", "ĠĠ", "Ġ12", "Ġ=", "Ġ345"]),
        ("granite-docling", ["x", "ĠĠ", "Ġ12", "Ġ=", "Ġ345"]),
        ("mellum2", ["x", "ĠĠĠ", "1", "2", "Ġ=", "Ġ", "3", "4", "5"]),
        ("grok-2", ["x", "ĠĠ", "Ġ", "1", "2", "Ġ=", "Ġ", "3", "4", "5"]),
        ("hunyuan", ["x", "ĠĠ", "Ġ", "1", "2", "Ġ=", "Ġ", "3", "4", "5"]),
        ("solar-open", ["x", "ĠĠ", "Ġ", "1", "2", "Ġ=", "Ġ", "3", "4", "5"]),
        ("chatglm-bpe", ["x", "ĠĠ", "Ġ", "12", "Ġ=", "Ġ", "345"]),
        ("glm4", ["x", "ĠĠ", "Ġ", "12", "Ġ=", "Ġ", "345"]),
        ("glm5", ["x", "ĠĠ", "Ġ", "12", "Ġ=", "Ġ", "345"]),
        ("smollm", ["x", "ĠĠĠ", "1", "2", "Ġ=", "Ġ", "3", "4", "5"]),
        ("stablelm2", ["x", "ĠĠ", "Ġ", "1", "2", "Ġ=", "Ġ", "3", "4", "5"]),
        ("llama-bpe", ["x", "ĠĠ", "Ġ", "12", "Ġ=", "Ġ", "345"]),
    ],
)
def test_text_is_split_as_the_file_says(
    tmp_path: Path, weights: Tensors, split: str, pieces: list[str]
) -> None:
    """The models' own tokenizers do so. With another split a model reads tokens that it was not trained
    on."""
    file = write(tmp_path / "tiny.gguf", in_gguf(weights), split=split)
    assert main([str(file), str(tmp_path / "made")]) == 0
    made = AutoTokenizer.from_pretrained(tmp_path / "made").backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in made.pre_tokenize_str("x   12 = 345")] == pieces


@pytest.mark.parametrize(
    ("split", "told"), [("deepseek-coder", " (deepseek-coder)"), (None, ", which it does not name")]
)
def test_a_split_that_nobody_knows_is_refused(
    tmp_path: Path, weights: Tensors, capsys: pytest.CaptureFixture[str], split: str | None, told: str
) -> None:
    file = write(tmp_path / "tiny.gguf", in_gguf(weights), split=split)
    assert refusal(file, capsys).endswith(f"how text is split for its tokens{told}")


@pytest.mark.parametrize(
    ("kind", "prefixed", "lost"),
    [
        ("llama", False, ["no space before a text (add_space_prefix)"]),
        ("llama", True, []),
        ("gemma2", False, []),
    ],
)
def test_a_space_that_a_file_does_not_want_before_a_text(
    tmp_path: Path, kind: str, prefixed: bool, lost: list[str]
) -> None:
    file = write(
        tmp_path / "tiny.gguf",
        {},
        lambda writer: writer.add_add_space_prefix(prefixed),
        kind=kind,
        tokenizer="llama",
        split=None,
    )
    assert lost_of_tokenizer(Header(GGUFReader(file))) == lost


@pytest.mark.parametrize(("kind", "is_lost"), [("llama", True), ("gpt2", False)])
def test_an_old_library_does_not_convert_a_sentencepiece_tokenizer(
    tmp_path: Path, kind: str, is_lost: bool
) -> None:
    """transformers 5.19 writes no token before a text, and vLLM's engine runs with it."""
    split = None if kind == "llama" else "default"
    header = Header(GGUFReader(write(tmp_path / "tiny.gguf", {}, tokenizer=kind, split=split)))
    assert any("5.24" in each for each in lost_of_tokenizer(header, "5.19.0")) is is_lost
    assert not any("5.24" in each for each in lost_of_tokenizer(header, "5.24.0"))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a a", ["▁", "a", "▁", "a"]),
        (" a", ["▁", "▁", "a"]),
        ("<s>a</s> a", ["<s>", "▁", "a", "</s>", "▁", "▁", "a"]),
    ],
)
def test_a_text_of_sentencepiece_begins_with_a_space_wherever_it_begins(
    tmp_path: Path, weights: Tensors, text: str, pieces: list[str]
) -> None:
    """The space is added after a special token and before another space, too, as in llama.cpp and the first
    Llamas."""

    def ends(writer: GGUFWriter) -> None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    vocabulary = ["<unk>", "<s>", "</s>", "▁", "a", *TOKENS[5:]]
    file = write(
        tmp_path / "tiny.gguf", in_gguf(weights), ends, tokenizer="llama", split=None, tokens=vocabulary
    )
    assert main([str(file), str(tmp_path / "made")]) == 0
    tokenizer = load_tokenizer(tmp_path / "made")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [vocabulary[each] for each in ids] == pieces
    assert tokenizer.encode("a", add_special_tokens=True) == [1, 3, 4]
    assert tokenizer.decode([3, 4, 3, 4], skip_special_tokens=False) == "a a"


def test_whatever_ends_a_turn_ends_an_answer(tmp_path: Path, weights: Tensors) -> None:
    def ends(writer: GGUFWriter) -> None:
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(3)

    file = write(tmp_path / "tiny.gguf", in_gguf(weights), ends)
    assert main([str(file), str(tmp_path / "made")]) == 0
    assert read_model(tmp_path / "made").eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("kind", "split", "pieces"),
    [
        ("starcoder2", "starcoder", ["x", "ĠĠĠ", "1", "2", "Ġ=", "Ġ", "3", "4", "5"]),
        ("qwen2", None, ["x", "ĠĠ", "Ġ", "1", "2", "Ġ=", "Ġ", "3", "4", "5"]),
        ("gpt2", None, ["x", "ĠĠ", "Ġ12", "Ġ=", "Ġ345"]),
    ],
)
def test_no_class_of_the_library_puts_a_split_of_its_own_in_its_place(
    tmp_path: Path, kind: str, split: str | None, pieces: list[str]
) -> None:
    file = write(tmp_path / "tiny.gguf", {}, kind=kind, split=split)
    header, config = Header(GGUFReader(file)), AutoConfig.from_pretrained(tmp_path, gguf_file=file.name)
    assert lost_of_tokenizer(header) == []
    config.save_pretrained(tmp_path)
    write_tokenizer(read_tokenizer(file, header, config), tmp_path)
    codec: Any = load_tokenizer(tmp_path).codec
    assert [piece for piece, _ in codec.pre_tokenizer.pre_tokenize_str("x   12 = 345")] == pieces


def test_a_split_that_the_library_would_not_keep_is_refused(
    tmp_path: Path, weights: Tensors, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text_splitting, "alike", lambda *_: False)
    file = write(tmp_path / "tiny.gguf", in_gguf(weights), split="smollm")
    assert refusal(file, capsys).endswith("would split text otherwise than smollm")


@pytest.mark.parametrize(
    ("split", "whole", "begun"),
    [
        ("llama-bpe", True, True),
        ("tekken", True, True),
        ("glm4", True, False),
        ("glm5", True, False),
        ("chatglm-bpe", False, False),
        ("mellum2", False, False),
        ("qwen2", False, False),
    ],
)
def test_a_piece_that_is_a_token_is_that_token_and_a_text_has_its_beginning(
    tmp_path: Path, weights: Tensors, split: str, whole: bool, begun: bool
) -> None:
    """Llama 3 and similar models need both, since their merges do not reach all tokens. GLM needs the first
    only."""
    vocabulary = [chr(0x100 + place) for place in range(tiny_models.VOCABULARY - 4)] + ["abc", "a", "b", "c"]
    file = write(
        tmp_path / "tiny.gguf",
        in_gguf(weights),
        lambda writer: writer.add_bos_token_id(0),
        split=split,
        tokens=vocabulary,
    )
    assert main([str(file), str(tmp_path / "made")]) == 0
    tokenizer = load_tokenizer(tmp_path / "made")
    ids = tokenizer.encode("abc", add_special_tokens=True)
    abc, a, b, c = range(tiny_models.VOCABULARY - 4, tiny_models.VOCABULARY)
    assert ids == [0] * begun + ([abc] if whole else [a, b, c])
    assert tokenizer.encode("abc", add_special_tokens=False) == ([abc] if whole else [a, b, c])
