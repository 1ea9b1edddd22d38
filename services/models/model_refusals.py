"""Checks of a model's files, which refuse a model that cannot be served before anything is started or
converted.

Neither the tensor library nor the transformers library is imported. Some missing features show only when a
model is loaded. Such a model is refused then.
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final

from baton.models.checkpoint_quantization import read_quantization
from baton.models.engine_features import STATE_FEATURES, MissingFeatures
from baton.models.library_types import LIBRARY, gguf_types, library_version
from baton.models.model_facts import (
    CONFIG_FILE,
    SINGLE_FILE,
    ModelNotFound,
    ModelUnreadable,
    UnsupportedModel,
    json_object,
    reading,
)
from baton.models.model_requirements import Json, needs_of, text_words

ADAPTERS: Final = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
MERGE: Final = (
    "merge it into its base model (PEFT's merge_and_unload, then save_pretrained) and serve the result"
)
EMBEDDING: Final = "modules.json"
"""Name of the file that sentence-transformers writes next to an embedding model."""
POOLING: Final = "Pooling"
TOKENIZERS: Final = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "merges.txt")
"""Glob patterns of the files of which a tokenizer may consist."""
WEIGHTS: Final = f"{SINGLE_FILE} or an index of several"
OTHER_WEIGHTS: Final = (
    ("*.gguf", "a GGUF file is given by itself: --model {file}"),
    ("consolidated*", "weights in their vendor's own form: take the release that transformers loads"),
    ("*.bin", "pickled weights, which are not read: load and save them with transformers (save_pretrained)"),
    ("*.pt*", "pickled weights, which are not read: load and save them with transformers (save_pretrained)"),
    ("*.safetensors", "weights under other names than {single}, and no index that lists them"),
    ("*.onnx", "weights of another library: take the release that transformers loads"),
    ("*.h5", "weights of another library: take the release that transformers loads"),
)
"""Pairs of a glob pattern of weight files that cannot be read, and advice for the user. The first match is
used."""


def refuse_by_files(directory: Path, name: str, missing: MissingFeatures) -> None:
    """Raise UnsupportedModel if the files in `directory` show features that the engine lacks.

    The text lists them all. `name`: name of the model, for the text. `missing`: features that the engine
    lacks. Raises ModelUnreadable for damaged files.
    """
    refuse_adapter(directory)
    config = json_object(directory / CONFIG_FILE, required=True)
    needs = [*missing(config, read_quantization(directory)), *_embeds(directory)]
    if needs:
        raise UnsupportedModel.needing(name, text_words(config).get("model_type"), needs)


def refuse_adapter(directory: Path) -> None:
    """Raise UnsupportedModel if `directory` holds an adapter such as LoRA, by itself or next to its base
    model."""
    found = next((file for file in ADAPTERS if (directory / file).is_file()), None)
    if found is None:
        return
    base = json_object(directory / ADAPTERS[0]).get("base_model_name_or_path")
    of = f" of {base}" if isinstance(base, str) and base else ""
    if not (directory / CONFIG_FILE).is_file():
        raise UnsupportedModel(
            f"--model {directory}: it holds an adapter{of} ({found}), not a model: {MERGE}"
        )
    raise UnsupportedModel(
        f"--model {directory}: it holds an adapter{of} ({found}) beside a model, which would be "
        f"served without it: {MERGE}, or take {found} out to serve the model alone"
    )


def refuse_without_tokenizer(directory: Path) -> None:
    """Raise ModelNotFound if `directory` has no file of a tokenizer."""
    if not any(next(directory.glob(pattern), None) for pattern in TOKENIZERS):
        raise ModelNotFound(
            f"--model {directory}: the directory has no tokenizer (tokenizer.json): copy the tokenizer's "
            "files from the model's release"
        )


def refuse_without_weights(directory: Path) -> None:
    """Raise ModelNotFound for a directory without safetensors weights.

    The text names weights in another format, if the directory has some.
    """
    refuse_other_weights(directory)
    raise ModelNotFound(
        f"--model {directory}: the directory has no safetensors weights ({WEIGHTS}); "
        "is its download complete?"
    )


def refuse_other_weights(directory: Path) -> None:
    """Raise ModelNotFound for a directory whose weights are in another format than safetensors."""
    for pattern, remedy in OTHER_WEIGHTS:
        file = next(iter(sorted(directory.glob(pattern))), None)
        if file is not None:
            advice = remedy.format(file=file, single=SINGLE_FILE)
            raise ModelNotFound(
                f"--model {directory}: no safetensors weights ({WEIGHTS}); {file.name}: {advice}"
            )


def _embeds(directory: Path) -> Iterator[str]:
    path = directory / EMBEDDING
    try:
        text = path.read_text("utf-8") if path.is_file() else ""
    except (OSError, ValueError):
        return
    if POOLING in text:
        yield f"an API of embeddings, for which its files are made ({EMBEDDING}): text alone is drawn here"


# ---- GGUF files

GGUF_MAGIC: Final = b"GGUF"
ARCHITECTURE: Final = "general.architecture"
KIND: Final = "general.type"
KINDS: Final[Mapping[str, str]] = {
    "adapter": "an adapter, not a model: merge it into its base model (llama-export-lora), serve the result",
    "mmproj": "a model's part for images or sound, not its language model: give the file of that",
    "imatrix": "an importance matrix, not a model",
    "vocab": "a vocabulary alone, not a model",
}
PROJECTORS: Final = frozenset({"clip", "mmproj"})
TYPES: Final[Mapping[str, str]] = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "minimax-m2": "minimax_m2",
    "t5encoder": "t5",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "command-r": "cohere",
    "gpt-oss": "gpt_oss",
}
"""Model type of the transformers library, by the GGUF architecture, for architectures with another name
there."""
LAYERS: Final[Mapping[str, Json]] = {"lfm2": {"layer_types": ["conv"]}}
"""Configurations of layers, by the GGUF architecture, where the architecture alone shows them."""
UNREAD: Final = frozenset({"gpt-oss", "deci"})
"""GGUF architectures that the transformers library lists, but whose files it cannot read."""
SCALARS: Final[Mapping[int, int]] = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a scalar value in a GGUF file, by the number that stands for its type there."""
STRING, ARRAY = 8, 9
KEYS_MAX: Final = 64
"""Most header fields of a GGUF file that are read to identify the model. The fields for this are
among the first."""
STRING_BYTES_MAX: Final = 2**20


def refuse_gguf(file: Path, missing: MissingFeatures) -> None:
    """Raise UnsupportedModel if the GGUF `file` holds no model, or one that cannot be served.

    `missing`: features that the engine lacks. Raises ModelUnreadable if the file is damaged.
    """
    with reading(file):
        fields = first_fields(file)
    architecture, kind = fields.get(ARCHITECTURE, ""), fields.get(KIND, "model")
    if architecture in PROJECTORS:
        kind = "mmproj"
    if kind in KINDS:
        raise UnsupportedModel(f"--model {file}: it holds {KINDS[kind]}")
    if not architecture:
        return
    model_type = TYPES.get(architecture, architecture)
    words = {"model_type": model_type, **LAYERS.get(architecture, {})}
    needs: list[str] = []
    if model_type in gguf_types() | set(TYPES.values()):
        states = [need for need in needs_of(words) if need in STATE_FEATURES]
        needs += dict.fromkeys([*states, *missing(words, None)])  # no conversion of states is checked
    known = {architecture, model_type, architecture.replace("-", "_")} & gguf_types()
    if gguf_types() and (not known or architecture in UNREAD):
        needs.append(
            f"a reader of GGUF files of {architecture}, which {LIBRARY} {library_version()} does not have"
        )
        needs.append("or the model's release in safetensors")
    if needs:
        raise UnsupportedModel.needing(file.name, architecture, needs)


def first_fields(file: Path) -> dict[str, str]:
    """Return the text values among a GGUF file's first header fields, by key, up to the first list.

    Raises ModelUnreadable if the header is damaged.
    """
    found: dict[str, str] = {}
    with file.open("rb") as stream:
        try:
            stream.seek(len(GGUF_MAGIC) + 4 + 8)  # the version, the number of tensors
            (count,) = struct.unpack("<Q", stream.read(8))
            for _ in range(min(count, KEYS_MAX)):
                key = _text(stream)
                (kind,) = struct.unpack("<I", stream.read(4))
                if kind == STRING:
                    found[key] = _text(stream)
                elif kind in SCALARS:
                    stream.seek(SCALARS[kind], 1)
                else:
                    break
        except (struct.error, ValueError) as error:
            raise ModelUnreadable(f"{file}: its header is damaged, or cut short") from error
    return found


def _text(stream: IO[bytes]) -> str:
    (size,) = struct.unpack("<Q", stream.read(8))
    if size > STRING_BYTES_MAX:
        raise ValueError(size)
    text = stream.read(size)
    if len(text) != size:
        raise ValueError(size)
    return text.decode("utf-8", "replace")
