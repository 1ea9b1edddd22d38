"""Facts about a model from its files, such as its context length, without loading it."""

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeGuard

from baton.models.fingerprint import config_digest, weights_digest
from baton.models.model_requirements import Json, canonical, text_words
from baton.rooms.request import EOS_TOKEN_IDS_MAX
from baton.runtime.errors import StartupError, describe_error
from baton.runtime.model_options import POSITIONS_MAX

CONFIG_FILE: Final = "config.json"
GENERATION_FILE: Final = "generation_config.json"
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
INDEX_ENDS: Final = ".safetensors.index.json"
HEADER_BYTES_MAX: Final = 100 * 2**20
CONTEXT_KEYS: Final = (
    "model_max_length",
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)
"""Keys under which a model's configuration may state its context length, in the order of preference.

Cohere's models have the first two.
"""
SCALED: Final = ("linear", "yarn")
"""Names of RoPE scalings whose factor extends the context length that the configuration states."""
ORIGINAL: Final = "original_max_position_embeddings"
LONGROPE: Final = ("longrope", "su")
"""Names of the RoPE scaling that has two lists of factors.

One is for sequences up to the original positions, the other for longer ones.
"""
WAY_OUT: Final = "; docs/models.md lists what is served, and other engines (vLLM, SGLang) serve more"
"""Ending of the error text for a model that is not supported, which points to supported models and to other
engines."""


class ModelNotFound(StartupError, ValueError):
    """The setting `--model` names nothing that can be served. The text says what is missing."""


class ModelUnreadable(StartupError, ValueError):
    """A file of the model is damaged or of an unknown form. The text names the file."""


class ContextTooLong(StartupError, ValueError):
    """The setting `--context-length` exceeds the positions of the model. The text has both numbers."""


class UnsupportedModel(StartupError):
    """The model needs a feature that is not implemented. The text names the model and the feature."""

    needs: tuple[str, ...] = ()
    """Descriptions of all features that the model needs and that are not implemented."""

    @classmethod
    def needing(cls, name: str, model_type: object, needs: Sequence[str]) -> "UnsupportedModel":
        listed = ", ".join(needs)
        error = cls(f"the model {name} ({model_type}) cannot be served: it needs {listed}{WAY_OUT}")
        error.needs = tuple(needs)
        return error


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that a service needs about a model, before it loads it or without loading it."""

    name: str
    """Name of the model that clients use in requests."""
    architecture: str
    """Name of the model's class, as its configuration states it, for example LlamaForCausalLM."""
    context_length: int
    """Most tokens of one sequence, prompt and output together."""
    vocab_size: int
    """Number of token ids. All ids are below it."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence token ids in ascending order. Empty for a model that never ends by itself."""
    fingerprint: str
    """Hash of the configuration, then of the weights (`baton.models.fingerprint`). It does not depend on the
    model's path. If the weights are unknown, it is the configuration's alone."""
    weights_known: bool = True
    """Whether `fingerprint` includes the weights."""


def read_model(
    directory: Path,
    name: str = "",
    *,
    dummy: bool = False,
    context_length: int = 0,
    may_lack_weights: bool = False,
) -> ModelFacts:
    """Return the facts of the model in `directory`.

    `name`: name for clients, by default the directory's own. `dummy`: weights are not read and may be
    missing. `context_length`: value of `--context-length` in tokens, 0 for the configuration's.
    `may_lack_weights`: accept a directory without weights, as the router does.

    Whether an engine serves the model is not judged. Raises ModelNotFound, ModelUnreadable or ContextTooLong.
    Raises UnsupportedModel if more ids end a sequence than a request can carry.
    """
    with reading(directory):
        weights_known = dummy or not may_lack_weights or has_weights(directory)
        files = weight_files(directory) if weights_known and not dummy else ()
        return _read_model(directory, name, files if weights_known else None, context_length)


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """Turn an OSError in the context into a ModelUnreadable that names the file and the reason."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or describe_error(error)
        raise ModelUnreadable(f"{error.filename or place}: it cannot be read: {reason}") from error


def _read_model(
    directory: Path, name: str, weights: Sequence[Path] | None, context_length: int
) -> ModelFacts:
    """Return the facts. `weights`: files that the fingerprint includes, None if they are unknown."""
    config = json_object(directory / CONFIG_FILE, required=True)
    architectures = config.get("architectures")
    words = _words_of_text(config)
    # A name with bytes that are no UTF-8 fits no JSON answer, so no client could request it.
    name = (name or own_name(directory)).encode(errors="replace").decode()
    vocab_size = _positive(directory, words, ("vocab_size",))
    return ModelFacts(
        name=name,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "",
        context_length=_context_length(directory, name, words, context_length),
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(directory, (config, words), vocab_size),
        fingerprint=config_digest(config) + ("" if weights is None else _weights_digest(weights)),
        weights_known=weights is not None,
    )


def _words_of_text(config: Json) -> Json:
    """Return the part of the configuration `config` about its language model.

    If that omits the model's size, as Gemma 3's files do, the transformers library's defaults for the type
    are added. The library is imported for that alone.
    """
    words = text_words(config)
    if "vocab_size" in words and not words.keys().isdisjoint(CONTEXT_KEYS):
        return words
    from transformers import CONFIG_MAPPING

    try:
        whole = CONFIG_MAPPING[canonical(config)["model_type"]].from_dict(canonical(config))
        known: Json = whole.get_text_config().to_dict()
    except Exception:  # an unknown model; what is missing is reported below
        return words
    return {**known, **words}


def own_name(directory: Path) -> str:
    """Return the model's own name: from `baton.json` in `directory`, or the repository whose snapshot it is.

    Otherwise it is the directory's name.
    """
    noted = json_object(directory / "baton.json").get("name")
    if isinstance(noted, str) and noted:
        return noted
    path = directory.resolve()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name or "model"


def has_weights(directory: Path) -> bool:
    """Return whether any safetensors file is in `directory`. An index of such files holds no weights."""
    return any(directory.glob("*.safetensors"))


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the safetensors files with the model's weights, sorted by name. There may be none.

    Of several sets it is the one that the transformers library loads: the one that the configuration names,
    else the single file. Raises ModelNotFound if the configuration or the index names a missing file.
    """
    stated = json_object(directory / CONFIG_FILE).get("transformers_weights")
    present = [name for name in (SINGLE_FILE, INDEX_FILE) if (directory / name).is_file()]
    if not stated and not present:
        return ()
    chosen = _there(directory, CONFIG_FILE, str(stated or present[0]))
    if not chosen.name.endswith(INDEX_ENDS):
        return (chosen,)
    index = json_object(chosen)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelUnreadable(f"{chosen}: no weight_map in it")
    if not isinstance(index.get("metadata"), dict):
        raise ModelUnreadable(
            f"{chosen}: no metadata in it, which the model library wants; an empty object will do"
        )
    names = sorted({str(name) for name in places.values()})
    return tuple(_there(directory, chosen.name, name) for name in names)


def _there(directory: Path, by: str, name: str) -> Path:
    """Return the path of the file `name` in `directory`. Raises ModelNotFound if it does not exist.

    `by`: file that refers to it.
    """
    file = directory / name
    if not file.is_file():
        raise ModelNotFound(f"--model {directory}: {by} names {name}, which is not there")
    return file


def _weights_digest(files: Sequence[Path]) -> str:
    return weights_digest((path, _header(path)) for path in files)


def stored_types(directory: Path) -> dict[str, str]:
    """Return the number format of each tensor in the model's weight files, by tensor name, as safetensors
    spells it.

    Raises ModelUnreadable.
    """
    tables = [json.loads(_header(path)) for path in weight_files(directory)]
    return {
        name: str(each.get("dtype"))
        for table in tables
        for name, each in table.items()
        if name != "__metadata__"
    }


def _header(path: Path) -> bytes:
    """Return a safetensors file's header: the JSON table of names, types, shapes and offsets.

    Raises ModelUnreadable if there is none, or the file ends before the last offset.
    """
    with path.open("rb") as file:
        lead = file.read(8)
        length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else HEADER_BYTES_MAX + 1
        header = file.read(length) if length <= HEADER_BYTES_MAX else b""
        size = file.seek(0, 2)
    if len(header) != length:
        raise ModelUnreadable(f"{path}: not a safetensors file, or cut short")
    try:
        table = json.loads(header)
        ends = [each["data_offsets"][1] for name, each in table.items() if name != "__metadata__"]
        missing = 8 + length + max(ends, default=0) - size
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelUnreadable(f"{path}: its table of weights is damaged: {describe_error(error)}") from error
    if missing > 0:
        raise ModelUnreadable(f"{path}: cut short, it lacks its last {missing} bytes")
    return header


def _eos_token_ids(directory: Path, configs: Sequence[Json], vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the generation settings, the configurations and the tokenizer.

    Ids outside the vocabulary are left out. Raises UnsupportedModel for more than a request can carry.
    """
    ids: set[int] = set()
    for stated in (json_object(directory / GENERATION_FILE), *configs):
        value = stated.get("eos_token_id")
        ids.update(each for each in (value if isinstance(value, list) else [value]) if _is_id(each))
    word = json_object(directory / "tokenizer_config.json").get("eos_token")
    content = word.get("content") if isinstance(word, dict) else word
    for added in json_object(directory / "tokenizer.json").get("added_tokens") or ():
        if isinstance(added, dict) and added.get("content") == content and _is_id(added.get("id")):
            ids.add(added["id"])
    drawn = tuple(sorted(each for each in ids if each < vocab_size))
    if len(drawn) > EOS_TOKEN_IDS_MAX:
        raise UnsupportedModel(
            f"{directory}: {len(drawn)} ids end a sequence, by generation_config.json, config.json and the "
            f"tokenizer; a request carries {EOS_TOKEN_IDS_MAX} at most"
        )
    return drawn


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _positive(directory: Path, config: Json, keys: tuple[str, ...], remedy: str = "") -> int:
    for key in keys:
        value = config.get(key)
        if _is_length(value):
            return value
    raise ModelUnreadable(f"{directory / 'config.json'}: no positive {', '.join(keys)} in it{remedy}")


def _is_length(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def _context_length(directory: Path, name: str, config: Json, given: int) -> int:
    """Return the context length in tokens: the `given` one, or else that of the model's configuration.

    With longrope scaling the latter counts only the original positions, as in vLLM. The factors for longer
    contexts would serve short sequences worse. Raises ContextTooLong if the given one exceeds what the model
    can hold.
    """
    if given and not any(_is_length(config.get(key)) for key in CONTEXT_KEYS):
        return given  # a model that cannot hold it is refused when it is loaded
    most = _most_positions(directory, config)
    if given > most:
        raise ContextTooLong(
            f"--context-length {given}: the model {name} holds {most} tokens at most, as its config.json "
            "says; a longer context takes its vendor's RoPE scaling written into that file"
        )
    original = [_original(config, kind, most) for kind, word in _scalings(config) if word in LONGROPE]
    return given or min([most, *original])


def _most_positions(directory: Path, config: Json) -> int:
    """Return the most positions of the model after RoPE scaling, as vLLM derives them.

    Linear scaling multiplies the stated positions, and YaRN the original ones. Every other scaling, and Gemma
    3's, is included in the stated positions.
    """
    stated = _positive(directory, config, CONTEXT_KEYS, "; --context-length sets one")
    scaled = []
    if "gemma3" not in str(config.get("model_type")):
        for kind, word in _scalings(config):
            factor = kind.get("factor")
            if word in SCALED and _is_factor(factor):
                scaled.append(int((_original(config, kind, stated) if word == "yarn" else stated) * factor))
    length = max(scaled, default=stated)
    if length > POSITIONS_MAX:
        raise ModelUnreadable(f"{directory / CONFIG_FILE}: a context of {length} tokens is none")
    return length


def _scalings(config: Json) -> Iterator[tuple[Json, object]]:
    """Yield the parameters and the name of each RoPE scaling in a configuration: one for all layers, or one
    for each layer type."""
    stated = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(stated, dict):
        for kind in (stated, *(value for value in stated.values() if isinstance(value, dict))):
            yield kind, kind.get("rope_type", kind.get("type"))


def _original(config: Json, kind: Json, stated: int) -> int:
    """Return the number of positions that the model had before RoPE scaling extended it.

    It is read from `config`, then from `kind`, the parameters of the scaling. If neither has it, it is
    `stated`, the positions that the configuration states, as in the transformers library.
    """
    named = (config.get(ORIGINAL), kind.get(ORIGINAL))
    return next((each for each in named if isinstance(each, int) and each > 0), stated)


def _is_factor(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < POSITIONS_MAX


def json_object(path: Path, required: bool = False) -> Json:
    """Return the JSON object in the file `path`. It is empty if the file is missing and not required.

    Raises ModelNotFound for a missing required file, ModelUnreadable for a damaged one.
    """
    if not required and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFound(f"--model {path.parent}: the directory has no {path.name}") from error
    except (ValueError, RecursionError) as error:
        raise ModelUnreadable(f"{path}: {describe_error(error)}") from error
    if not isinstance(value, dict):
        raise ModelUnreadable(f"{path}: not a JSON object")
    return value
