"""Tests that a model which is not served is refused by its files, in one line with a way out."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from baton.launch.model_check import check_models
from baton.models import library_types
from baton.models.engine_features import missing_in_torch, missing_in_vllm
from baton.models.library_types import drawing_types, gguf_types, known_types
from baton.models.model_facts import ModelNotFound, ModelUnreadable, UnsupportedModel, read_model
from baton.models.model_files import resolve
from tests.models.test_model_files import write_weights
from tests.ports import free_port

LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
SERVED_ELSEWHERE: Final = "docs/models.md lists what is served, and other engines (vLLM, SGLang) serve more"
BY_CONFIGURATION: Final[list[tuple[dict[str, Any], str]]] = [
    (
        {"model_type": "deepseek_v32", "kv_lora_rank": 512},
        "(deepseek_v32) cannot be served: it needs layers of type indexed_attention;",
    ),
    ({"model_type": "glm_moe_dsa"}, "it needs layers of type indexed_attention;"),
    ({"model_type": "rwkv", "attention_hidden_size": 64}, "it needs states in a cache of its own, "),
    ({"model_type": "minimax"}, "it needs states in a cache of its own, "),
    ({"model_type": "t5", "is_encoder_decoder": True}, "it needs an encoder"),
    ({"model_type": "whisper", "is_encoder_decoder": True}, "it needs an encoder;"),
    ({"model_type": "vit"}, "it needs a definition that draws text"),
    ({"model_type": "clip"}, "it needs a definition that draws text"),
    ({"use_bidirectional_attention": True}, "it needs attention to later tokens;"),
    (
        {"model_type": "gemma3n", "text_config": {"num_kv_shared_layers": 10}},
        "keys and values shared between layers;",
    ),
    ({"model_type": "nonesuch"}, "it needs a definition of its type, which transformers "),
    (
        {"model_type": "chatglm", "auto_map": {"AutoModel": "x.y"}},
        "does not have (its own Python files are not run);",
    ),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        "files have that of LlamaForSequenceClassification;",
    ),
    ({"architectures": ["LlamaForTokenClassification"]}, "files have that of LlamaForTokenClassification;"),
    ({"architectures": ["Qwen2ForRewardModel"]}, "files have that of Qwen2ForRewardModel;"),
    ({"architectures": ["LlamaForQuestionAnswering"]}, "files have that of LlamaForQuestionAnswering;"),
    (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "weights quantised by bitsandbytes (take the release",
    ),
    ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "weights quantised by gptq of 3 bits"),
    (
        {"model_type": "kimi_k2", "quantization_config": {"quant_method": "aqlm"}},
        "(kimi_k2) cannot be served: it needs weights quantised by aqlm",
    ),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "mine"
    directory.mkdir()
    write_weights(directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return directory


@pytest.mark.parametrize(
    ("words", "line"), BY_CONFIGURATION, ids=[each[1][-40:] for each in BY_CONFIGURATION]
)
def test_a_model_is_refused_by_its_configuration(model: Path, words: dict[str, Any], line: str) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | words))
    with pytest.raises(UnsupportedModel) as refused:
        resolve(str(model), missing=missing_in_torch)
    assert line in str(refused.value)
    assert str(refused.value).endswith(SERVED_ELSEWHERE)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"model_type": "bart", "is_encoder_decoder": False},
        {"model_type": "lfm2", "layer_types": ["full_attention"]},
        {"model_type": "lfm2", "full_attn_idxs": [2], "num_hidden_layers": 4},
        {"model_type": "kimi_linear", "kv_lora_rank": 512},
        {"model_type": "mamba", "state_size": 16},
        {"model_type": "qwen3_next"},
        {"model_type": "jamba"},
        {"layer_types": ["conv", "full_attention"]},
        {"architectures": None},
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
        {"quantization_config": {"quant_method": "fp8"}},
        {"model_type": "deepseek_v3", "kv_lora_rank": 512},
        {"model_type": "kimi_k2"},
    ],
)
def test_a_model_that_may_be_served_is_not(model: Path, words: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | words))
    assert resolve(str(model), missing=missing_in_torch).path == model


def test_the_bootstrap_leaves_the_engine_s_part_to_the_workers(model: Path) -> None:
    for words, line in BY_CONFIGURATION:
        (model / "config.json").write_text(json.dumps(LLAMA | words))
        if "files have that of" in line:
            with pytest.raises(UnsupportedModel) as refused:
                resolve(str(model))
            assert line in str(refused.value)
        else:
            assert resolve(str(model)).path == model


BY_VLLM: Final[list[tuple[dict[str, Any], list[str]]]] = [
    ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, []),
    ({"model_type": "kimi_k2"}, []),
    ({"model_type": "nonesuch", "quantization_config": {"quant_method": "aqlm"}}, []),
    ({"model_type": "gemma3n", "num_kv_shared_layers": 10}, []),
    ({"model_type": "mamba"}, []),
    ({"layer_types": ["conv", "full_attention"]}, []),
    ({"model_type": "jetmoe"}, ["attention heads that are experts"]),
    ({"model_type": "kimi_linear", "kv_lora_rank": 512, "layer_types": ["linear_attention"]}, []),
    (
        {
            "model_type": "t5",
            "architectures": ["T5ForTokenClassification"],
            "quantization_config": {"quant_method": "aqlm"},
        },
        ["an encoder", "a head that draws text, where its files have that of T5ForTokenClassification"],
    ),
]


@pytest.mark.parametrize(("words", "needs"), BY_VLLM, ids=[str(each[0])[:40] for each in BY_VLLM])
def test_vllm_s_engine_lacks_other_features(model: Path, words: dict[str, Any], needs: list[str]) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | words))
    if not needs:
        assert resolve(str(model), missing=missing_in_vllm).path == model
        return
    with pytest.raises(UnsupportedModel) as refused:
        resolve(str(model), missing=missing_in_vllm)
    assert list(refused.value.needs) == needs


def other(name: str, text: str = "{}") -> Callable[[Path], None]:
    """Return a change that adds a file."""

    def add(directory: Path) -> None:
        (directory / name).write_text(text)

    return add


def without(*names: str) -> Callable[[Path], None]:
    """Return a change that removes files."""

    def remove(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return remove


ADAPTER: Final = json.dumps({"base_model_name_or_path": "meta-llama/Llama-3.1-8B"})
BY_FILES: Final[list[tuple[list[Callable[[Path], None]], str]]] = [
    (
        [without("config.json", "model.safetensors"), other("adapter_config.json", ADAPTER)],
        "it holds an adapter of meta-llama/Llama-3.1-8B (adapter_config.json), not a model: merge it into",
    ),
    (
        [other("adapter_config.json", ADAPTER)],
        "beside a model, which would be served without it: merge it into its base model",
    ),
    (
        [other("adapter_model.safetensors", "")],
        "it holds an adapter (adapter_model.safetensors) beside a model",
    ),
    (
        [other("modules.json", '[{"type": "sentence_transformers.models.Pooling"}]')],
        "it needs an API of embeddings",
    ),
    ([without("config.json")], "the directory has no config.json"),
    ([without("config.json"), other("params.json")], "params.json is of the vendor's own form"),
    ([without("config.json"), other("model_index.json")], "a model that makes images, which is not served"),
    ([without("config.json"), other("m.gguf", "GGUF")], "a GGUF file is given by itself: --model "),
    ([without("model.safetensors")], "is its download complete?"),
    (
        [without("model.safetensors"), other("m.gguf", "GGUF")],
        "m.gguf: a GGUF file is given by itself: --model ",
    ),
    (
        [without("model.safetensors"), other("pytorch_model.bin")],
        "pytorch_model.bin: pickled weights, which are not read",
    ),
    (
        [without("model.safetensors"), other("consolidated.00.pth")],
        "take the release that transformers loads",
    ),
    (
        [without("model.safetensors"), other("weights.safetensors")],
        "weights under other names than model.safetensors",
    ),
    ([without("model.safetensors"), other("model.safetensors.index.json")], "no weight_map in it"),
    ([without("model.safetensors"), other("model.safetensors.index.json", "{")], "JSONDecodeError"),
    (
        [
            without("model.safetensors"),
            other(
                "model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": "gone.safetensors"}}'
            ),
        ],
        "names gone.safetensors, which is not there",
    ),
    ([other("config.json", "{")], "config.json: JSONDecodeError"),
    ([other("config.json", "[]")], "config.json: not a JSON object"),
    ([other("config.json", '{"quantization_config": 4}')], "its quantization_config is no object"),
]


@pytest.mark.parametrize(("changes", "line"), BY_FILES, ids=[each[1][:40] for each in BY_FILES])
def test_a_directory_is_refused_by_its_files(
    model: Path, changes: list[Callable[[Path], None]], line: str
) -> None:
    for change in changes:
        change(model)
    with pytest.raises((UnsupportedModel, ModelNotFound, ModelUnreadable)) as refused:
        resolve(str(model))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_repository_of_the_cache_names_its_snapshot(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--me--mine" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    with pytest.raises(ModelNotFound, match=f"a snapshot of it has: --model {snapshot}$"):
        resolve(str(tmp_path / "models--me--mine"))


# ---- GGUF files


def gguf(folder: Path, fields: Mapping[str, str], count: int | None = None) -> Path:
    file = folder / "some.gguf"
    text = b"".join(
        struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IQ", 8, len(value)) + value.encode()
        for key, value in fields.items()
    )
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields) if count is None else count) + text)
    return file


@pytest.mark.parametrize(
    ("architecture", "kind", "line"),
    [
        ("llama", "adapter", "it holds an adapter, not a model: merge it"),
        ("clip", "mmproj", "it holds a model's part for images or sound"),
        ("clip", "model", "it holds a model's part for images or sound"),
        ("llama", "vocab", "it holds a vocabulary alone"),
        ("mamba", "model", "it needs state-space or recurrent layers (Mamba, RWKV)"),
        ("qwen35", "model", "it needs linear-attention or state-space (Mamba) layers"),
        ("gemma4", "model", "it needs layers that differ from each other"),
        ("lfm2", "model", "it needs convolution layers"),
        ("t5", "model", "it needs an encoder"),
        ("deepseek2", "model", "it needs a reader of GGUF files of deepseek2, which transformers "),
        ("command-r", "model", "a reader of GGUF files of command-r"),
        ("gpt-oss", "model", "a reader of GGUF files of gpt-oss, which transformers "),
        ("nonesuch", "model", "or the model's release in safetensors"),
    ],
)
def test_a_gguf_file_is_refused_by_its_first_fields(
    tmp_path: Path, architecture: str, kind: str, line: str
) -> None:
    file = gguf(tmp_path, {"general.architecture": architecture, "general.type": kind})
    with pytest.raises(UnsupportedModel) as refused:
        resolve(str(file), missing=missing_in_torch)
    assert line in str(refused.value)


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen2moe", "qwen3moe", "gemma3", "minimax-m2", "falcon"]
)
def test_a_gguf_file_of_an_architecture_that_is_read_is_not(tmp_path: Path, architecture: str) -> None:
    file = gguf(tmp_path, {"general.architecture": architecture})
    assert resolve(str(file), missing=missing_in_torch).path == file


def test_a_gguf_file_that_is_cut_in_its_header(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match="its header is damaged, or cut short"):
        resolve(str(gguf(tmp_path, {"general.architecture": "llama"}, count=2)))


# ---- kimi_k2 is deepseek_v3 by another name


def test_another_name_of_a_type_has_the_same_facts(model: Path) -> None:
    """Both names get the library's default sizes of the type when the file leaves them out."""
    found = []
    for kind in ("kimi_k2", "deepseek_v3"):
        (model / "config.json").write_text(json.dumps({"model_type": kind}))
        found.append(read_model(model))
    assert found[0].context_length == found[1].context_length > 0
    assert found[0].vocab_size == found[1].vocab_size


# ---- what the library knows


def test_the_types_that_the_library_s_source_lists_are_those_that_it_knows() -> None:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    assert known_types() >= set(CONFIG_MAPPING_NAMES)
    draws = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert drawing_types() == draws
    assert gguf_types() >= set(GGUF_CONFIG_MAPPING) - {"general", "tokenizer"}


def test_a_library_that_is_laid_out_otherwise_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_types, "LIBRARY", "baton")
    for each in (known_types, drawing_types, gguf_types):
        assert each.__wrapped__() == frozenset()


@pytest.mark.sweep
def test_what_the_library_s_configurations_show_is_seen_in_the_files() -> None:
    """This covers every released type, though a file may leave out whatever equals the type's default."""
    from tests.models.recipes import released
    from tests.models.sweep import all_types, refused_as_released

    for kind in all_types():
        try:
            refused = refused_as_released(kind)
        except Exception:  # a configuration that the library itself does not make
            continue
        words = released(kind).to_dict()
        short = {key: words[key] for key in ("model_type", "is_encoder_decoder") if key in words}
        assert bool(missing_in_torch(words, None)) == (refused is not None), kind
        assert not missing_in_torch(short, None) or refused is not None, kind
        assert refused is None or missing_in_torch({"model_type": kind}, None), kind


# ---- the commands


def test_a_stack_is_refused_a_model_without_a_tokenizer(model: Path) -> None:
    check_models(str(model), "auto")
    with pytest.raises(
        ModelNotFound, match=r"no tokenizer \(tokenizer.json\): copy the tokenizer's files from"
    ):
        check_models(str(model), "auto", needs_tokenizer=True)
    (model / "tokenizer.json").write_text("{}")
    check_models(str(model), "auto", needs_tokenizer=True)


@pytest.mark.stack
@pytest.mark.parametrize(
    ("command", "draft"),
    [
        ("serve", False),
        ("prefill", False),
        ("decode", False),
        ("worker", False),
        ("worker --side prefill", False),
        ("prefill --tp 2", False),
        ("serve", True),
        ("decode", True),
    ],
)
def test_a_command_refuses_before_it_imports_or_starts_anything(
    model: Path, tmp_path: Path, command: str, draft: bool
) -> None:
    """Neither the tensor library nor a converter, which would note it, is imported."""
    noted = tmp_path / "imported"
    for name in ("torch", "gguf", "transformers"):
        package = tmp_path / "fakes" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"open({str(noted)!r}, 'w').close()\nraise ImportError\n")
    (model / "tokenizer.json").write_text("{}")
    words = LLAMA | {"num_kv_shared_layers": 2}
    bad = model
    if draft:
        bad = model.with_name("draft")
        bad.mkdir()
        write_weights(bad / "model.safetensors")
    (bad / "config.json").write_text(json.dumps(words))
    flags = ["--model", str(model), *(["--speculate", f"model:{bad}"] if draft else [])]
    ports = ["--port", str(free_port()), "--grpc-port", "0"]
    given = {"serve": ports}
    flags += given.get(command, ["--bootstrap", "127.0.0.1:1"])
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli.main", *command.split(), *flags],
        env={"PATH": "", "PYTHONPATH": str(tmp_path / "fakes"), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "cannot be served: it needs keys and values shared between layers" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert (done.returncode, done.stdout) == (1, "")
    assert not noted.exists()
    assert not (tmp_path / "cache").exists()
    assert ("--speculate" in done.stderr) == draft
