"""Tests that models which would be computed wrongly are refused, naming what is missing in one line."""

import errno
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from baton.decode.settings import DecodeSettings
from baton.engine.engine_startup import start_engine
from baton.engine.execution.attention_span import AttentionSpan
from baton.engine.kv_cache import PagedKvCache
from baton.engine.loading.capability_probes import COUNTING, WINDOW, refuse_by_configuration
from baton.engine.loading.engine_loading import load_engine
from baton.engine.loading.library_model import LibraryModel
from baton.engine.loading.model_loading import load_model
from baton.engine.loading.rank_shard import CannotSplit
from baton.inference.collectives import LocalCollectives, alone
from baton.inference.device import DeviceNotFound, find_device, find_dtype
from baton.inference.kv_memory import NotEnoughMemory
from baton.models.model_facts import ModelUnreadable, UnsupportedModel, weight_files
from baton.models.model_requirements import OWN_CACHE
from baton.rooms.worker_facts import CANARY_TOKENS
from baton.runtime.errors import StartupError
from baton.runtime.model_options import LoadFormat
from baton.topology import Topology
from tests.engine import tiny_models

BY_CONFIGURATION: list[tuple[str, dict[str, Any], str]] = [
    ("DeepseekV32Config", {}, "layers of type indexed_attention"),
    ("T5Config", {}, "an encoder"),
    ("InklingTextConfig", {}, "layers of type hybrid_sliding"),
    ("SiglipConfig", {}, "a definition that draws text, which the transformers library does not have"),
]


@pytest.mark.parametrize(("kind", "options", "needs"), BY_CONFIGURATION, ids=lambda each: str(each)[:24])
def test_refused_by_configuration(kind: str, options: dict[str, Any], needs: str) -> None:
    config = getattr(transformers, kind)(**options)
    with pytest.raises(UnsupportedModel, match=f"the model mine .*cannot be served: it needs .*{needs}"):
        refuse_by_configuration("mine", config)


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_supported_models_are_not_refused(architecture: str) -> None:
    refuse_by_configuration("mine", tiny_models.ARCHITECTURES[architecture])


def test_a_window_of_the_positions_before_they_are_scaled_is_seen(tmp_path: Path) -> None:
    turns = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    config = transformers.MistralConfig(
        **tiny_models.SHAPE, sliding_window=tiny_models.CONTEXT, rope_parameters=turns
    )
    model = load_model(tiny_models.save(config, tmp_path / "scaled"), "float32", "cpu")
    assert model.spans == dict.fromkeys(range(3), AttentionSpan(tiny_models.CONTEXT))


def test_sinks_are_seen_when_the_configuration_is_silent(tmp_path: Path) -> None:
    """gpt-oss without windows: only the call of its attention tells of the sinks."""
    config = transformers.GptOssConfig(
        **{**tiny_models.SHAPE, "num_local_experts": 2, "num_experts_per_tok": 1},
        layer_types=["full_attention"] * 3,
    )
    model = load_model(tiny_models.save(config, tmp_path / "sinks"), "float32", "cpu")
    assert all(sight.sinks is not None for sight in model.attention.values())
    assert not model.spans


WINDOWS: Final = {**tiny_models.SHAPE, "sliding_window": 64}


def test_probe_can_fail_a_window_that_is_not_in_the_mask_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is wider than any small probe pass, so only the function that makes the mask shows it."""
    directory = tiny_models.save(transformers.MistralConfig(**WINDOWS), tmp_path / "windows")
    monkeypatch.setattr(
        "transformers.models.mistral.modeling_mistral.create_sliding_window_causal_mask", create_causal_mask
    )
    with pytest.raises(UnsupportedModel, match=f"it needs {WINDOW};"):
        load_model(directory, "float32", "cpu")


def test_probe_can_fail_a_window_that_only_the_librarys_cache_has_is_refused(tmp_path: Path) -> None:
    """Moshi's definition lets a prompt see more than it keeps of it."""
    config = transformers.MoshiConfig(**WINDOWS, ffn_dim=80, audio_vocab_size=64)
    with pytest.raises(UnsupportedModel, match=f"it needs {WINDOW};"):
        load_model(tiny_models.save(config, tmp_path / "moshi"), "float32", "cpu")


def test_probe_can_fail_a_mask_that_is_no_window_behind_the_small_pass_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens attend to all earlier ones, except one token far behind."""

    def blind(window: int) -> Callable[..., torch.Tensor]:
        def sees(_: int, __: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & (key != window)

        return sees

    directory = tiny_models.save(transformers.MistralConfig(**WINDOWS), tmp_path / "blind")
    monkeypatch.setattr("transformers.masking_utils.sliding_window_causal_mask_function", blind)
    with pytest.raises(UnsupportedModel, match="it needs an attention mask of its own"):
        load_model(directory, "float32", "cpu")


LENGTH_SCALED: Final[dict[str, Any]] = {
    **tiny_models.SHAPE,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 80,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "floor_scale": tiny_models.CONTEXT - 4,
    "attn_scale": 0.5,
}


def test_probe_can_fail_a_scale_by_length_that_begins_late_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 counts a step's tokens from 0 unless a cache tells it otherwise."""
    directory = tiny_models.save(transformers.Llama4TextConfig(**LENGTH_SCALED), tmp_path / "scaled")
    load_model(directory, "float32", "cpu")
    monkeypatch.setattr(
        LibraryModel, "_needs_counts", property(lambda _: False, lambda *_: None), raising=False
    )
    monkeypatch.setattr("baton.engine.loading.model_loading.load_row_by_row", no_other_way)
    with pytest.raises(UnsupportedModel, match=f"it needs {COUNTING};"):
        load_model(directory, "float32", "cpu")


@pytest.mark.parametrize("load_format", [LoadFormat.AUTO, LoadFormat.DUMMY], ids=str)
def test_a_definition_with_attentions_of_its_own_alone_is_computed_row_by_row(
    tmp_path: Path, load_format: LoadFormat
) -> None:
    config = transformers.FalconConfig(
        vocab_size=131, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = load_model(
        tiny_models.save(config, tmp_path / "falcon"), "float32", "cpu", load_format=load_format
    )
    assert model.definition is not None
    with pytest.raises(UnsupportedModel, match=r"with an attention of ours: its definition takes none$"):
        load_model(tmp_path / "falcon", "float32", "cpu", alone_of(Topology(2)), load_format)


def test_a_container_whose_language_model_is_no_part_of_its_own_is_refused_in_words(tmp_path: Path) -> None:
    text = {**tiny_models.SHAPE, "num_attention_heads": 4, "projection_dim": 48}
    vision = {**text, "image_size": 32, "patch_size": 8, "num_hidden_layers": 1}
    config = transformers.BlipConfig(text_config=text, vision_config=vision)
    with pytest.raises(UnsupportedModel, match="it needs a language model of its own"):
        load_model(tiny_models.save(config, tmp_path / "blip"), "float32", "cpu")


def test_attention_to_later_tokens_is_seen(tmp_path: Path) -> None:
    """An encoder under the name of a language model."""
    shape = {**tiny_models.SHAPE, "num_attention_heads": 4, "pad_token_id": 0}
    config = transformers.BertConfig(**shape, is_decoder=False)
    with pytest.raises(UnsupportedModel, match="attention to later tokens"):
        load_model(tiny_models.save(config, tmp_path / "bert"), "float32", "cpu")


def test_positions_that_a_definition_counts_otherwise_are_seen(tmp_path: Path) -> None:
    """A decoder of the RoBERTa family has its first token behind the place of the padding."""
    shape = {**tiny_models.SHAPE, "num_attention_heads": 4, "pad_token_id": 1}
    config = transformers.RobertaConfig(**shape, is_decoder=True)
    with pytest.raises(UnsupportedModel, match=f"it needs {COUNTING};"):
        load_model(tiny_models.save(config, tmp_path / "roberta"), "float32", "cpu")


BART: dict[str, Any] = {
    "vocab_size": tiny_models.VOCABULARY,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": tiny_models.CONTEXT,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind", ["Bart", "MBart", "Blenderbot", "BlenderbotSmall", "Pegasus", "PLBart", "Marian"]
)
def test_probe_can_fail_a_definition_that_counts_each_step_from_0_is_computed_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    """Decoders of the BART family take no positions. Of one sequence from its beginning they count right."""
    config = getattr(transformers, f"{kind}Config")(**BART)
    directory = tiny_models.save(config, tmp_path / kind)
    assert load_model(directory, dtype, "cpu").definition is not None
    monkeypatch.setattr("baton.engine.loading.model_loading.load_row_by_row", no_other_way)
    with pytest.raises(UnsupportedModel, match=f"it needs {COUNTING};"):
        load_model(directory, dtype, "cpu")


def no_other_way(*_: object) -> LibraryModel:
    raise UnsupportedModel


def test_probe_can_fail_tokens_that_see_others_outside_their_attention_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shift of tokens does that. It is right for one sequence from its beginning."""
    forward = LlamaMLP.forward

    def shifted(mlp: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = forward(mlp, x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
        return out

    monkeypatch.setattr(LlamaMLP, "forward", shifted)
    directory = tiny_models.save(tiny_models.ARCHITECTURES["llama-gqa-untied"], tmp_path / "shifted")
    with pytest.raises(UnsupportedModel, match=f"it needs {COUNTING};"):
        load_model(directory, "float32", "cpu")


def test_probe_can_fail_a_table_of_positions_that_is_shorter_than_the_context_is_refused(
    tmp_path: Path,
) -> None:
    directory = tiny_models.save(tiny_models.ARCHITECTURES["gpt2-learned-positions"], tmp_path / "gpt2")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_seq_len": 64, "model_max_length": 600}))
    with pytest.raises(UnsupportedModel, match="does not run over pages: index out of range"):
        load_model(directory, "float32", "cpu")


def test_one_refusal_names_all_that_is_missing(tmp_path: Path) -> None:
    """One refusal names the needs found without the model library and those found with it."""
    config = transformers.RwkvConfig(vocab_size=131, hidden_size=32, num_hidden_layers=2).to_dict()
    config |= {"quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel) as refused:
        load_model(tmp_path, "float32", "cpu")
    assert f"it needs {OWN_CACHE}, weights quantised by bitsandbytes" in str(refused.value)


def test_a_configuration_of_wrong_types(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "num_hidden_layers": "three"}))
    with pytest.raises(UnsupportedModel, match="does not know its configuration"):
        load_model(llama, "float32", "cpu")


def test_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "nonesuch", "vocab_size": 9, "max_position_embeddings": 9})
    )
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"\(nonesuch\) .* a definition of its type, which"):
        load_model(tmp_path, "float32", "cpu")


@pytest.fixture
def llama(tiny_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a Llama checkpoint for a test to damage."""
    return Path(shutil.copytree(tiny_dir("llama-gqa-untied"), tmp_path / "llama"))


def test_weights_that_are_missing_are_not_made_up(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnreadable, match=r"lack 1 of .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(llama, "float32", "cpu")


@pytest.mark.parametrize("ranks", [Topology(), Topology(2)], ids=["alone", "of two"])
def test_an_index_that_was_left_behind_is_not_loaded(llama: Path, ranks: Topology) -> None:
    """The loaded files are those that the fingerprint is of."""
    weights = load_file(llama / "model.safetensors")
    others = {name: weight + 1 for name, weight in weights.items()}
    save_file(others, llama / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    places = dict.fromkeys(others, "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": places}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(llama) == (llama / "model.safetensors",)
    model = load_model(llama, "float32", "cpu", alone_of(ranks))
    assert torch.equal(model.weights()[0], weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("ranks", [Topology(), Topology(2)], ids=["alone", "of two"])
def test_weights_that_are_cut_short(llama: Path, ranks: Topology) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelUnreadable, match=r"model\.safetensors: cut short, it lacks its last 1000 bytes"):
        load_model(llama, "float32", "cpu", alone_of(ranks))


@pytest.mark.parametrize("ranks", [Topology(), Topology(2)], ids=["alone", "of two"])
def test_a_weight_of_another_shape_is_named_with_both(llama: Path, ranks: Topology) -> None:
    weights = load_file(llama / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: weights[name][:-1].clone()}, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelUnreadable, match=r"up_proj\.weight has the shape \[79, 48\], not \[80, 48\]"):
        load_model(llama, "float32", "cpu", alone_of(ranks))


@pytest.mark.parametrize("ranks", [Topology(), Topology(2)], ids=["alone", "of two"])
@pytest.mark.parametrize("reason", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_weights_that_cannot_be_mapped_are_one_line(
    llama: Path, monkeypatch: pytest.MonkeyPatch, ranks: Topology, reason: int
) -> None:
    """The library opens the files itself, so it may come that far and no farther."""

    def fails(path: object, *_: object, **__: object) -> None:
        raise OSError(reason, os.strerror(reason), str(path))

    monkeypatch.setattr("transformers.modeling_utils.safe_open", fails)
    monkeypatch.setattr("baton.engine.loading.weight_files.safe_open", fails)
    with pytest.raises(ModelUnreadable, match=os.strerror(reason)) as refused:
        load_model(llama, "float32", "cpu", alone_of(ranks))
    assert str(llama) in str(refused.value)


class Unforeseen(Exception):
    """An error in no list of the library's errors."""


@pytest.mark.parametrize(
    "place",
    [
        "baton.engine.loading.library_loading.AutoConfig.from_pretrained",
        "baton.engine.loading.model_loading.refuse_by_configuration",
        "baton.engine.loading.text_model.AutoModelForCausalLM.from_pretrained",
        "baton.engine.loading.library_model.LibraryModel.logits",
    ],
)
def test_an_error_that_nobody_foresaw_is_one_line_that_names_the_model(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """The example is a configuration whose values differ by layer, which fails on each access."""

    def fails(*_: object, **__: object) -> None:
        raise Unforeseen("first line\nsecond line")

    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(place, fails)
    with pytest.raises(UnsupportedModel) as refused:
        load_model(llama, "float32", "cpu")
    assert str(refused.value) == (
        f"the model {llama} cannot be served: the transformers library fails with it, in fails: "
        "Unforeseen: first line"
    )
    assert "the model library failed" in [each.getMessage() for each in caplog.records]


@pytest.mark.parametrize(
    "place",
    [
        "baton.engine.loading.library_model.LibraryModel.logits",
        "baton.engine.loading.runner_selection.comparison_results",
        "baton.engine.loading.runner_selection.FusedDecoder",
    ],
)
def test_a_device_whose_memory_ends_while_a_model_loads_is_no_fault_of_the_model(
    llama: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nGPU 0 has")

    monkeypatch.setattr(place, fails)
    with pytest.raises(StartupError) as refused:
        start_engine(DecodeSettings(model=str(llama), device="cpu", compiled_steps=False), 1)
    assert not isinstance(refused.value, UnsupportedModel)
    assert str(refused.value) == (
        f"the model {llama} takes more memory than is left on its device, which other processes may share: "
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    )


def test_values_that_differ_by_layer_are_refused_in_words(tmp_path: Path) -> None:
    """The library has no single value for the whole model, and raises on access."""
    transformers.Dots3NoteTextConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"it needs .*layers that differ from each other"):
        load_model(tmp_path, "float32", "cpu", load_format=LoadFormat.DUMMY)


WRITES: Final = "from pathlib import Path\nPath({path!r}).write_text('ran')\n"


def test_nothing_of_a_model_directory_runs(
    llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No code of the directory runs, even if the question at a terminal were answered with yes."""
    marker = tmp_path / "ran"
    for name in ("configuration_mine", "modeling_mine"):
        (llama / f"{name}.py").write_text(WRITES.format(path=str(marker)))
    config = json.loads((llama / "config.json").read_text())
    own = {"AutoConfig": "configuration_mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"}
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for changed in ({"auto_map": own}, {"auto_map": own, "model_type": "mine"}):
        (llama / "config.json").write_text(json.dumps({**config, **changed}))
        with suppress(UnsupportedModel):
            load_model(llama, "float32", "cpu")
        assert not marker.exists()


@pytest.mark.parametrize("ranks", [Topology(), Topology(2)], ids=["alone", "of two"])
def test_pickled_weights_are_never_opened(llama: Path, tmp_path: Path, ranks: Topology) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return Path.write_text, (tmp_path / "ran", "ran")

    (llama / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Runs()}))
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "transformers_weights": "pytorch_model.bin"}))
    with pytest.raises(ModelUnreadable, match=r"pytorch_model\.bin: not a safetensors file"):
        load_model(llama, "float32", "cpu", alone_of(ranks))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("device", ["cuda:99", "mps", "nonsense"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(DeviceNotFound, match=f"--device {device}"):
        find_device(device)


@pytest.mark.parametrize(
    ("told", "dtype"),
    [
        ({"avx2": True, "avx512_bf16": False}, "float32"),
        ({}, "float32"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
        ({"architecture": "arm64", "bf16": True}, "bfloat16"),
    ],
    ids=str,
)
def test_bfloat16_is_chosen_where_the_cpu_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, llama: Path, told: dict[str, object], dtype: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told)
    assert engine_in(llama, "auto") == dtype
    assert engine_in(llama, "bfloat16") == "bfloat16"


def engine_in(directory: Path, dtype: str) -> str:
    engine = load_engine(directory, dtype=dtype, device="cpu", kv_cache_memory=1 << 20)
    return engine.cache.group.dtype


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")]
)
def test_bfloat16_is_chosen_where_the_gpu_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert find_dtype("auto", torch.device("cuda", 0), alone()) == dtype


def test_ranks_on_unlike_hosts_compute_in_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    class BesideAnOlderCpu(LocalCollectives):
        def minimum(self, number: int) -> int:
            return min(number, 0)

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    rank_group = BesideAnOlderCpu(Topology(2), 0)
    assert find_dtype("auto", torch.device("cpu"), rank_group) == "float32"
    assert find_dtype("bfloat16", torch.device("cpu"), rank_group) == "bfloat16"


def test_memory_for_less_than_a_page(llama: Path) -> None:
    with pytest.raises(
        NotEnoughMemory, match=r"--kv-cache-memory 1000 holds 0 pages .* 1 .* needed at least: 12288 bytes"
    ):
        load_engine(llama, dtype="float32", device="cpu", page_tokens=16, kv_cache_memory=1000, threads=1)


def test_memory_for_less_than_a_worker_needs_to_get_ready(llama: Path) -> None:
    """With less memory, a canary could never succeed, and the stack would never report why."""
    told = rf"12288 holds 1 page of 16 tokens, and {-(-CANARY_TOKENS // 16)} are needed"
    with pytest.raises(NotEnoughMemory, match=told):
        load_engine(
            llama,
            dtype="float32",
            device="cpu",
            page_tokens=16,
            kv_cache_memory=12288,
            tokens_min=CANARY_TOKENS,
        )


def test_more_memory_than_the_machine_has(llama: Path) -> None:
    with pytest.raises(NotEnoughMemory, match=r"asks for \d+ bytes on cpu, but \d+ are available (on|under)"):
        load_engine(llama, dtype="float32", device="cpu", kv_cache_memory=2**50, threads=1)


def test_the_cache_is_as_large_as_it_says_and_aligned(llama: Path) -> None:
    engine = load_engine(llama, dtype="float32", device="cpu", kv_cache_memory=100_000, threads=1)
    cache: PagedKvCache = engine.cache
    assert cache.pages == 100_000 // engine.cache.group.page_bytes == 8
    assert cache.length == 8 * engine.cache.group.page_bytes
    assert cache.tokens == 8 * 16
    assert cache.address % 4096 == 0
    assert cache.tensor.data_ptr() == cache.address
    assert cache.tensor[3].data_ptr() - cache.address == 3 * engine.cache.group.page_bytes


# ---- what several ranks cannot share


def alone_of(ranks: Topology) -> LocalCollectives:
    """Return the group of the first rank, before it has met the others."""
    return LocalCollectives(ranks, 0)


HEADS_9_3 = {**tiny_models.SHAPE, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}


@pytest.mark.parametrize(
    ("options", "topology", "message"),
    [
        (HEADS_9_3, Topology(2), r"^--tp 2: the model .* has 9 attention heads"),
        ({**HEADS_9_3, "num_attention_heads": 6}, Topology(2), r"^--tp 2: the model .* has 3 KV heads"),
        (tiny_models.SHAPE, Topology(4), r"^--tp 4: the model .* has 6 attention heads"),
        (
            {**tiny_models.SHAPE, "intermediate_size": 81},
            Topology(2),
            r"^--tp 2: model\.layers\.\*\.mlp\.gate_proj of the model .* is 81 wide",
        ),
        (tiny_models.SHAPE, Topology(1, 4), r"^--pp 4: the model .* has 3 layers"),
        (tiny_models.SHAPE, Topology(1, 1, 2), r"^2 context-parallel ranks"),
    ],
    ids=lambda each: str(each)[:28],
)
def test_a_number_of_ranks_that_a_model_cannot_be_cut_into_is_named_with_its_flag(
    tmp_path: Path, options: dict[str, Any], topology: Topology, message: str
) -> None:
    directory = tiny_models.save(transformers.LlamaConfig(**options), tmp_path / "odd")
    with pytest.raises(CannotSplit, match=message):
        load_model(directory, "float32", "cpu", alone_of(topology))


@pytest.mark.parametrize(
    ("architecture", "topology", "need"),
    [
        ("gpt2-learned-positions", Topology(2), "a tensor-parallel plan, which its definition lacks"),
        ("gpt2-learned-positions", Topology(1, 3), "a pipeline plan, which its definition lacks"),
    ],
)
def test_a_model_that_several_ranks_would_compute_wrongly_is_refused_by_what_it_needs(
    tiny_dir: Callable[[str], Path], architecture: str, topology: Topology, need: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"cannot be served by several ranks: it needs {need}"):
        load_model(tiny_dir(architecture), "float32", "cpu", alone_of(topology))


@pytest.mark.parametrize(
    ("path", "style"),
    [
        ("layers.*.mlp", "unheard_of"),
        ("layers.*.self_attn.k_proj", "unheard_of"),
        ("layers.*.self_attn.q_proj.weight", "unheard_of"),
        ("layers.*.mlp", "moe_tp_experts"),
        ("layers.*.mlp.experts", "ep_dispatch_experts"),
    ],
)
def test_a_style_that_is_not_known_or_does_not_fit_is_refused_by_its_name(
    tiny_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, path: str, style: str
) -> None:
    plan = transformers.Qwen3MoeConfig.base_model_tp_plan
    assert plan is not None
    uncut = {each: told for each, told in plan.items() if ".experts" not in each}
    monkeypatch.setattr(transformers.Qwen3MoeConfig, "base_model_tp_plan", {**uncut, path: style})
    needs = r"needs (the tensor-parallel style \w+ \(for|a tensor-parallel plan of) model\.layers"
    with pytest.raises(UnsupportedModel, match=needs):
        load_model(tiny_dir("qwen3-moe"), "float32", "cpu", alone_of(Topology(2)))


def test_an_attention_that_stays_whole_is_refused(
    tiny_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would store the KV of all heads in pages made for some of them."""
    monkeypatch.setattr("baton.engine.loading.model_partition.COMMON", {})
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", {"embed_tokens": "replicate"})
    heads = r"its attention has 6 query heads and 2 KV heads of 16 numbers on a rank, where 3 .* and 1 .*"
    with pytest.raises(UnsupportedModel, match=f"by several ranks: {heads} were expected"):
        load_model(tiny_dir("llama-gqa-untied"), "float32", "cpu", alone_of(Topology(2)))


def test_a_norm_over_all_heads_that_is_no_rms_norm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.Olmo2Config(**{**tiny_models.SHAPE, "head_dim": 8})
    directory = tiny_models.save(config, tmp_path / "normed")
    monkeypatch.setattr(Olmo2RMSNorm, "forward", lambda norm, hidden: norm.weight + hidden)
    with pytest.raises(
        UnsupportedModel, match=r"a norm over all heads, .*\.q_norm.weight, that is no RMS norm but a Olmo2"
    ):
        load_model(directory, "float32", "cpu", alone_of(Topology(2)))


def test_a_first_stage_that_would_need_what_comes_behind_the_last_layer_is_refused(tmp_path: Path) -> None:
    """Nanochat's norm comes before its layers, too."""
    directory = tiny_models.save(transformers.NanoChatConfig(**tiny_models.SHAPE), tmp_path / "nano")
    with pytest.raises(
        UnsupportedModel, match="ranks: it needs before its first layer what comes behind its last one"
    ):
        load_model(directory, "float32", "cpu", alone_of(Topology(1, 3)))
