"""Tests that a GGUF file's settings are used, or that the file is refused by their keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import AutoConfig, Gemma2Config, Gemma3TextConfig, PreTrainedConfig, Starcoder2Config

from baton.engine.gguf import gguf_settings
from baton.engine.gguf.conversion_checks import Header, lost_settings, write_positions
from baton.engine.gguf.convert import main
from baton.engine.gguf.gguf_settings import KNOWN_KEYS, write_settings
from tests.engine import tiny_models
from tests.engine.gguf.gguf_files import Write, nothing, tensors_of, write

ARCHITECTURES: Final = (
    *(
        "llama",
        "qwen2",
        "qwen2moe",
        "qwen3",
        "qwen3moe",
        "phi3",
        "gemma2",
        "gemma3",
        "starcoder2",
        "stablelm",
    ),
    *("gpt2", "bloom", "falcon", "nemotron", "minimax-m2"),
)
OTHERS: Final[Mapping[str, Any]] = {
    "attention.causal": False,
    "rope.scaling.type": "yarn",
    "tensor_data_layout": "another",
}
FRACTIONS: Final = ("scale", "softcapping", "freq_base", "factor", "alpha", "bias", "clamp", "log_mul")
UNREAD: Final = frozenset({"vocab_size", "rope.scaling.finetuned", "rope.scaling.original_context_length"})
"""Keys that change no result, the last one only if nothing is scaled from it."""
SIZES: Final = frozenset(
    {f"attention.{each}_length{of}" for each in ("key", "value") for of in ("", "_swa")}
    | {f"attention.layer_norm{of}_epsilon" for of in ("", "_rms")}
)
"""Keys with tests of their own."""
EXPERTS: Final = frozenset({"expert_count", "expert_used_count"})
WIDTHS: Final = frozenset({"expert_feed_forward_length", "expert_shared_feed_forward_length"})
COMPUTED: Final[Mapping[str, frozenset[str]]] = {
    "gemma2": frozenset({"attn_logit_softcapping", "final_logit_softcapping"}) | {"attention.sliding_window"},
    "gemma3": frozenset({"final_logit_softcapping", "rope.freq_base_swa"})
    | {"attention.sliding_window", "attention.sliding_window_pattern"},
    "qwen2moe": EXPERTS | WIDTHS,
    "qwen3moe": EXPERTS | {"expert_feed_forward_length"},
    "minimax-m2": EXPERTS,
    "stablelm": frozenset({"use_parallel_residual"}),
}
"""Keys that are used whatever their value is, or that StableLM's tensors imply."""


def value_of(key: str) -> Any:
    """Return a value that changes the model if anything reads it."""
    return OTHERS.get(key, 7.5 if any(each in key for each in FRACTIONS) else 7)


def added(settings: Mapping[str, Any]) -> Write:
    """Add settings of the architecture that the file does not have."""

    def add(writer: GGUFWriter) -> None:
        for key, value in settings.items():
            name = f"{writer.arch}.{key}"
            if any(name in part for part in writer.kv_data):
                continue
            match value:
                case bool():
                    writer.add_bool(name, value)
                case int():
                    writer.add_uint32(name, value)
                case float():
                    writer.add_float32(name, value)
                case str():
                    writer.add_string(name, value)
                case _:
                    writer.add_array(name, value)

    return add


def configured(
    folder: Path, kind: str, settings: Mapping[str, Any], **shape: Any
) -> tuple[Header, PreTrainedConfig]:
    """Return a file with these settings, and the configuration made of it."""
    file = write(folder / "tiny.gguf", {}, added(settings), kind=kind, **shape)
    header = Header(GGUFReader(file))
    config = AutoConfig.from_pretrained(folder, gguf_file=file.name)
    write_settings(header, config)
    write_positions(header, config)
    return header, config


def lost_keys(header: Header, config: PreTrainedConfig) -> set[str]:
    prefix = f"{header.architecture}."
    lost = lost_settings(header, config)
    return {each.partition(" (")[0].removeprefix(prefix) for each in lost if each.startswith(prefix)}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_key_of_an_architecture_is_computed_with_or_refused_by_name(tmp_path: Path, kind: str) -> None:
    """One file has all keys, each with a value that changes the model. One refusal names all that are not
    supported."""
    ours = {key: value_of(key) for key in KNOWN_KEYS - SIZES}
    ours |= {"dense_2_feat_in": 7, "attention.nobody_knows_it": 0, "vision.block_count": 7}
    header, config = configured(tmp_path, kind, ours, turned=8)
    known = {key for key in ours if header.settings[key] == ours[key]}
    assert len(known) > 90
    betas = {key for key in known if "yarn_beta" in key}
    assert known - lost_keys(header, config) == UNREAD & known | betas | COMPUTED.get(kind, frozenset())


REAL: Final[list[tuple[str, dict[str, Any], dict[str, Any]]]] = [
    (
        "llama",
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "tensor_data_layout": "Meta AI original pth",
        }
        | {
            "rope.scaling.type": "none",
            "rope.scaling.attn_factor": 1.0,
            "expert_count": 0,
            "attention.scale": 0.25,
        },
        {},
    ),
    ("qwen3", {"attention.key_length": 16, "attention.value_length": 16, "pooling_type": 0}, {}),
    (
        "qwen3moe",
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
        | {"attention.key_length": 16, "attention.value_length": 16},
        {},
    ),
    (
        "qwen2moe",
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
        | {"expert_shared_feed_forward_length": 64, "expert_gating_func": 1},
        {"turned": 8},
    ),
    (
        "gemma2",
        {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 64}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {},
    ),
    (
        "gemma3",
        {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 64}
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 1e4},
        {"theta": 1e6},
    ),
    ("gemma3", {"attention.sliding_window": 64, "rope.local.freq_base": 1e4}, {"theta": 1e6, "turned": 256}),
    ("phi3", {"attention.sliding_window": 0, "rope.scaling.original_context_length": 512}, {"turned": 8}),
    ("stablelm", {"use_parallel_residual": True}, {"turned": 2, "theta": 1e5}),
    ("starcoder2", {}, {"turned": 8, "theta": 1e6}),
    ("nemotron", {}, {"turned": 4}),
    (
        "bloom",
        {"feed_forward_length": 192},
        {"shape": tiny_models.SHAPE | {"num_key_value_heads": 6, "intermediate_size": 192}},
    ),
    ("gpt2", {}, {"shape": tiny_models.SHAPE | {"num_key_value_heads": 6}}),
    ("falcon", {}, {"turned": 8, "shape": tiny_models.SHAPE | {"num_key_value_heads": 1}}),
]
"""Settings as released files have them: the architecture, settings that not every file has, and the shape."""


@pytest.mark.parametrize(
    ("kind", "settings", "shape"), REAL, ids=lambda each: each if isinstance(each, str) else ""
)
def test_what_released_files_say_is_not_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any], shape: dict[str, Any]
) -> None:
    header, config = configured(tmp_path, kind, settings, **shape)
    assert lost_settings(header, config) == []
    assert config.max_position_embeddings == tiny_models.CONTEXT


@pytest.mark.parametrize(
    ("key", "kind"), [("layer_norm_rms_epsilon", "gpt2"), ("layer_norm_epsilon", "llama")]
)
def test_an_epsilon_of_another_norm_is_refused(tmp_path: Path, key: str, kind: str) -> None:
    header, config = configured(
        tmp_path, kind, {f"attention.{key}": 1e-3}, shape=tiny_models.SHAPE | {"num_key_value_heads": 6}
    )
    assert lost_keys(header, config) == {f"attention.{key}"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("falcon", "layer_norm_epsilon"),
        ("bloom", "layer_norm_epsilon"),
        ("gpt2", "layer_norm_epsilon"),
        ("stablelm", "layer_norm_eps"),
        ("starcoder2", "norm_epsilon"),
        ("nemotron", "norm_eps"),
        ("llama", "rms_norm_eps"),
        ("minimax-m2", "rms_norm_eps"),
    ],
)
def test_the_epsilon_of_the_norms_is_the_file_s(tmp_path: Path, kind: str, name: str) -> None:
    _, config = configured(tmp_path, kind, {})
    assert getattr(config, name) == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("kind", "layers", "scalar"),
    [("gemma2", 46, 8), ("gemma2", 42, 16), ("gemma3", 62, 8), ("gemma3", 46, 16)],
)
def test_gemma_s_attention_scale_follows_the_number_of_layers(
    tmp_path: Path, kind: str, layers: int, scalar: int
) -> None:
    """No file has the scale. llama.cpp recognises the 27B models by their number of layers."""
    shape = tiny_models.SHAPE | {"num_hidden_layers": layers}
    settings = {"attention.key_length": 16, "attention.sliding_window": 64}
    header, config = configured(tmp_path, kind, settings, shape=shape)
    assert lost_settings(header, config) == []
    assert config.query_pre_attn_scalar == scalar


@pytest.mark.parametrize(
    ("pattern", "lost"), [(6, False), ([True, True, True], False), ([True, False, True], True)]
)
def test_the_layers_that_have_a_window_are_the_file_s(tmp_path: Path, pattern: Any, lost: bool) -> None:
    settings = {"attention.sliding_window": 64, "attention.sliding_window_pattern": pattern}
    header, config = configured(tmp_path, "gemma3", {**settings, "attention.key_length": 16})
    assert lost_keys(header, config) == ({"attention.sliding_window_pattern"} if lost else set())


def test_a_window_that_only_the_library_has_is_refused(tmp_path: Path) -> None:
    """llama.cpp gives Gemma 3 windows where the file says one; the library always does."""
    header, config = configured(tmp_path, "gemma3", {"attention.key_length": 16})
    config.sliding_window = 64
    assert lost_settings(header, config) == [
        "attention without a window, where Gemma3TextConfig has one of 64 tokens"
    ]


def test_a_llama_named_mistral_gets_no_window_that_it_does_not_have(tmp_path: Path) -> None:
    def named(writer: GGUFWriter) -> None:
        writer.add_name("mistral")

    file = write(tmp_path / "tiny.gguf", {}, named)
    header, config = Header(GGUFReader(file)), AutoConfig.from_pretrained(tmp_path, gguf_file=file.name)
    assert (config.model_type, config.sliding_window) == ("mistral", 4096)
    write_positions(header, config)
    assert config.sliding_window is None


GEMMA: Final = {**tiny_models.SHAPE, "num_hidden_layers": 7, "sliding_window": 64, "query_pre_attn_scalar": 8}
CONVERTED: Final[list[tuple[str, PreTrainedConfig, dict[str, Any]]]] = [
    (
        "gemma2",
        Gemma2Config(**GEMMA, attn_logit_softcapping=20.0, final_logit_softcapping=10.0),
        {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "attention.sliding_window": 64}
        | {"attention.key_length": 16, "attention.value_length": 16},
    ),
    (
        "gemma3",
        Gemma3TextConfig(
            **GEMMA,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        {"attention.sliding_window": 64, "attention.key_length": 16, "attention.value_length": 16}
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    (
        "starcoder2",
        Starcoder2Config(
            **{**tiny_models.SHAPE, "head_dim": 8},
            norm_epsilon=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        {},
    ),
]


@pytest.mark.parametrize(("kind", "config", "settings"), CONVERTED, ids=[each[0] for each in CONVERTED])
def test_a_converted_model_computes_what_its_source_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    config: PreTrainedConfig,
    settings: dict[str, Any],
) -> None:
    """The models have fewer layers than the 27B models, so that the library reads them in seconds."""
    monkeypatch.setattr(
        gguf_settings,
        "SCALE_BY_WIDTH",
        {kind: frozenset({GEMMA["num_hidden_layers"]})},
    )
    source = tiny_models.save(config, tmp_path / "source")
    layers = config.num_hidden_layers
    file = write(
        tmp_path / "tiny.gguf",
        tensors_of(source, kind, layers),
        added(settings),
        kind=kind,
        theta=1e4 if kind == "gemma2" else 1e6,
        turned=8 if kind == "starcoder2" else 16,
        shape={**tiny_models.SHAPE, "num_hidden_layers": layers},
    )
    assert main([str(file), str(tmp_path / "made"), "tiny"]) == 0
    tokens = torch.arange(100)[None] % tiny_models.VOCABULARY
    with torch.inference_mode():
        expected, found = (
            tiny_models.maker_of(config)
            .from_pretrained(tmp_path / each, dtype=torch.float32, attn_implementation="eager")(tokens)
            .logits
            for each in ("source", "made")
        )
    assert torch.allclose(found, expected, atol=1e-4)


def test_the_converter_refuses_all_lost_settings_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"attention.scale": 0.5, "logit_scale": 0.25, "expert_count": 8, "attn_logit_softcapping": 30.0}
    file = write(tmp_path / "tiny.gguf", {}, added(lost))
    assert main([str(file), str(tmp_path / "made")]) == 1
    assert not (tmp_path / "made").exists()
    line = capsys.readouterr().err.splitlines()[-1]
    assert all(f"llama.{key} ({value:g})" in line for key, value in lost.items())


@pytest.mark.parametrize(
    ("kind", "need"), [("mamba", "states of layers"), ("gemma4", "layers that differ"), ("t5", "an encoder")]
)
def test_a_file_of_a_model_that_is_not_served_is_refused_before_its_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, need: str
) -> None:
    assert main([str(write(tmp_path / "tiny.gguf", {}, nothing, kind=kind)), str(tmp_path / "made")]) == 1
    told = capsys.readouterr()
    assert need in told.err.splitlines()[-1]
    assert "weights" not in told.out
