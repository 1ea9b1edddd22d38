"""Checks that the transformers library converts all weights and settings of a GGUF file.

The library's reader ignores some rotary settings, windows and weights that it does not know. Without them it
would make another model of the file.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFReader, ReaderTensor, get_tensor_name_map

from baton.engine.gguf.gguf_file import strips_of
from baton.engine.gguf.gguf_settings import shown, unread_settings
from baton.engine.gguf.text_splitting import BYTE_LEVEL, spaced, split_of
from baton.engine.loading.library_loading import LIBRARY, LIBRARY_NEEDED, is_old_library

THETA: Final = 10_000.0
"""Base of the rotary embeddings that applies if a GGUF file states none."""
FREQUENCIES: Final = "rope_freqs"
FACTORS: Final = ("rope_factors_long", "rope_factors_short")
"""Prefixes of the names of tensors that divide rotary frequencies, for long and for short sequences. They are
no weights."""
LENGTHS: Final = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
"""GGUF keys of factors that scale rotated queries and keys. transformers has no setting for them."""
YARN: Final = "yarn"
YARN_SETTINGS: Final[Mapping[str, tuple[str, float]]] = {
    "rope.scaling.original_context_length": ("original_max_position_embeddings", 0),
    "rope.scaling.yarn_beta_fast": ("beta_fast", 32),
    "rope.scaling.yarn_beta_slow": ("beta_slow", 1),
}
"""YaRN settings by their GGUF key: the name in a configuration, and the default."""
BASES: Final = ("rope.freq_base", "rope.global.freq_base")
"""GGUF keys of the rotary base: llama.cpp's and Ollama's."""
LOCAL_BASES: Final = ("rope.freq_base_swa", "rope.local.freq_base")
"""GGUF keys of the rotary base for layers with a sliding window: llama.cpp's and Ollama's."""
WINDOW: Final = "attention.sliding_window"
DEFAULT_WINDOWS: Final[Mapping[str, int]] = {"gemma2": 4096}
"""Sliding window in tokens that llama.cpp uses if a GGUF file does not state one, by architecture."""
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
LOWER_HALF: Final = 0xFFFF
"""Mask of the lower half of a float32's bits, which are 0 in a number that is exact in bfloat16."""
ENDS: Final = ("eos", "eot", "eom")
"""Parts of the GGUF keys that name an end token: end of a text, of a turn, and of a message that calls a
tool."""


class Header:
    """Header of a GGUF file: its settings, and the names and sizes of its tensors."""

    def __init__(self, file: GGUFReader) -> None:
        self._file = file
        self.architecture = str(self._field("general.architecture"))

    def setting(self, key: str) -> Any:
        """Return the GGUF file's value of the architecture's setting `key`, or None if the file lacks it."""
        return self._field(f"{self.architecture}.{key}")

    def of_tokenizer(self, key: str) -> Any:
        """Return the GGUF file's value of the tokenizer's setting `key`, or None if the file lacks it."""
        return self._field(f"tokenizer.ggml.{key}")

    @property
    def ends(self) -> list[int]:
        """Ids of the tokens that end an answer or a turn, in ascending order."""
        ids = [self.of_tokenizer(f"{name}_token_id") for name in ENDS]
        return sorted({int(each) for each in ids if each is not None})

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of elements of each tensor in the GGUF file, by tensor name."""
        return {each.name: int(each.n_elements) for each in self._file.tensors}

    @property
    def scaled(self) -> bool:
        """Whether the GGUF file divides any rotary frequency by a factor other than 1."""
        tensors = (each for each in self._file.tensors if each.name.startswith(FREQUENCIES))
        return any(number != 1 for each in tensors for number in each.data.flatten().tolist())

    @property
    def narrow(self) -> bool:
        """Whether every number of every tensor in the GGUF file is exact in bfloat16. Reads one tensor at a
        time."""
        return all(_is_narrow(each) for each in self._file.tensors)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the model's architecture in the header, by key without the architecture's prefix."""
        prefix = f"{self.architecture}."
        keys = [key for key in self._file.fields if key.startswith(prefix)]
        return {key.removeprefix(prefix): self._field(key) for key in keys}

    def _field(self, key: str) -> Any:
        field = self._file.fields.get(key)
        return None if field is None else field.contents()


def _is_narrow(tensor: ReaderTensor) -> bool:
    """Return whether all numbers of a tensor are exact in bfloat16, which is the upper half of a float32.

    Numbers of quantized tensors usually are not.
    """
    if tensor.tensor_type is GGMLQuantizationType.BF16:
        return True
    strips = strips_of(tensor.data, tensor.tensor_type)
    return not any((strip.view(np.uint32) & LOWER_HALF).any() for strip in strips)


def lost_settings(header: Header, config: Any) -> list[str]:
    """Return descriptions of the GGUF file's settings that the transformers configuration lacks: keys and
    values."""
    return [
        *_lost_scaling(header, config),
        *_lost_positions(header, config),
        *_lost_windows(header, config),
        *unread_settings(header, config),
    ]


def write_positions(header: Header, config: Any) -> None:
    """Write rotary settings and windows that transformers' GGUF reader ignored into `config`.

    Only attributes that this configuration has are written.
    """
    setting, rotation = header.setting, getattr(config, "rope_parameters", None) or {}
    base, local = _base(header), _local_base(header)
    scaling, factor = _scaling(header)
    if FULL in rotation and SLIDING in rotation:
        rotation[FULL]["rope_theta"] = base
        if local is not None:
            rotation[SLIDING]["rope_theta"] = local
        if header.architecture == "gemma3" and scaling == "linear" and factor != 1:
            rotation[FULL] |= {"rope_type": scaling, "factor": factor}  # llama.cpp scales no others
    elif "rope_theta" in rotation:
        rotation["rope_theta"] = base
    if config.model_type == "mistral" and not setting(WINDOW):
        config.sliding_window = None


def _base(header: Header) -> float:
    return next((float(found) for key in BASES if (found := header.setting(key))), THETA)


def _local_base(header: Header) -> float | None:
    """Return the rotary base of layers with a sliding window, or None if the GGUF file has no separate
    one."""
    return next((float(found) for key in LOCAL_BASES if (found := header.setting(key))), None)


def _scaling(header: Header) -> tuple[str, float]:
    kind = str(header.setting("rope.scaling.type") or "linear")
    return kind, float(header.setting("rope.scaling.factor") or header.setting("rope.scale_linear") or 1.0)


def _lost_scaling(header: Header, config: Any) -> Iterator[str]:
    rotations = _rotations(config)
    kind, factor = _scaling(header)
    scaled = kind != "none" and (kind, factor) != ("linear", 1.0)
    matching = [each for each in rotations if _is(each, kind, factor)]
    if scaled and not matching:
        keys = ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")
        yield from (shown(header, key) for key in keys if key in header.settings)
    if header.scaled and not any(_is(each, "llama3") for each in rotations):
        yield f"RoPE scaling (Llama 3's, {FREQUENCIES})"
    if any(name.startswith(FACTORS) for name in header.sizes) and not any(
        _is(each, "longrope") for each in rotations
    ):
        yield "RoPE scaling (longrope)"
    yield from (shown(header, key) for key in LENGTHS if header.setting(key) not in (None, 0, 1))
    if scaled and kind == YARN:
        for key, (name, default) in YARN_SETTINGS.items():
            value = header.setting(key)
            if value and any(not math.isclose(each.get(name) or default, value) for each in matching):
                yield shown(header, key)


def _lost_positions(header: Header, config: Any) -> Iterator[str]:
    rotations_by_type = getattr(config, "rope_parameters", None) or {}
    full, sliding = (rotations_by_type.get(each, rotations_by_type) for each in (FULL, SLIDING))
    for keys, rotation in ((BASES, full), (LOCAL_BASES, sliding)):
        for key in keys:
            base = header.setting(key)
            if base and ("rope_theta" in rotation or key in LOCAL_BASES) and not _near(rotation, base):
                yield shown(header, key)
    if "rope_theta" in full and not any(map(header.setting, BASES)) and not _near(full, THETA):
        yield f"a RoPE base of {THETA:g}, which is meant where none is given"
    turned, local = header.setting("rope.dimension_count"), header.setting("rope.dimension_count_swa")
    if turned and "rope_theta" in full and turned != _turned(config, full):
        yield shown(header, "rope.dimension_count")
    if local and ("rope_theta" not in sliding or local != _turned(config, sliding)):
        yield shown(header, "rope.dimension_count_swa")


def _near(rotation: Mapping[str, Any], base: float) -> bool:
    return math.isclose(rotation.get("rope_theta") or 0, base, rel_tol=1e-6)


def _lost_windows(header: Header, config: Any) -> Iterator[str]:
    window, context = header.setting(WINDOW), header.setting("context_length")
    if window is None:
        window = DEFAULT_WINDOWS.get(header.architecture)
    least = context or math.inf
    looks_back = isinstance(window, int) and 0 < window < least
    layers = _windowed_layers(config)
    has = getattr(config, "sliding_window", None) if any(layers) else None
    if looks_back and has != window:
        yield shown(header, WINDOW)
    elif not looks_back and has and has < least:
        yield f"attention without a window, where {type(config).__name__} has one of {has} tokens"
    pattern = header.setting(f"{WINDOW}_pattern")
    if looks_back and pattern is not None and _pattern(pattern, len(layers)) != layers:
        yield shown(header, f"{WINDOW}_pattern")


def _windowed_layers(config: Any) -> list[bool]:
    count = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        return [bool(windowed)] * count
    return [kind == SLIDING for kind in kinds]


def _pattern(value: Any, layers: int) -> list[bool]:
    """Return for each layer whether it has a sliding window.

    `value`: a list with an entry for each layer, or a period n: every n-th layer has none.
    """
    if isinstance(value, list):
        return [bool(each) for each in value]
    period = int(value)
    return [period == 0 or layer % period < period - 1 for layer in range(layers)]


def lost_of_tokenizer(header: Header, version: str = LIBRARY) -> list[str]:
    """Return descriptions of the tokenizer's settings that the library's reader ignores.

    `version`: version of the transformers library.
    """
    split = header.of_tokenizer("pre")
    found = []
    if header.of_tokenizer("model") == BYTE_LEVEL and split_of(header) is None:
        found.append(
            "how text is split for its tokens" + (f" ({split})" if split else ", which it does not name")
        )
    if spaced(header) and header.of_tokenizer("add_space_prefix") is False:
        found.append("no space before a text (add_space_prefix)")
    if spaced(header) and is_old_library(version):
        found.append(
            f"the token before a text, which transformers {LIBRARY_NEEDED} writes and {version} does not"
        )
    return found


def lost_weights(header: Header, model: Any) -> list[str]:
    """Return names of weights in the GGUF file for which the transformers `model` has no parameter.

    Empty if it can hold all.
    """
    sizes = {name: size for name, size in header.sizes.items() if not name.startswith("rope_")}
    if getattr(model.config, "tie_word_embeddings", False):
        sizes.pop("output.weight", None)
    state: dict[str, Any] = model.state_dict()
    if sum(sizes.values()) <= sum({each.data_ptr(): each.numel() for each in state.values()}.values()):
        return []
    kinds = [kind for kind, name in MODEL_ARCH_NAMES.items() if name == header.architecture]
    names = get_tensor_name_map(kinds[0], header.setting("block_count")) if kinds else None
    placed = set() if names is None else {names.get_name(each, (".weight", ".bias")) for each in state}
    return [name for name in sizes if name not in placed]


def _rotations(config: Any) -> list[Mapping[str, Any]]:
    """Return the rotary settings of a configuration: none, one for all layers, or one for each type of
    layer."""
    rotations_by_type = getattr(config, "rope_parameters", None) or {}
    return [
        each
        for each in (rotations_by_type, *rotations_by_type.values())
        if isinstance(each, dict) and "rope_theta" in each
    ]


def _is(rotation: Mapping[str, Any], kind: str, factor: float | None = None) -> bool:
    return rotation.get("rope_type") == kind and factor in (None, rotation.get("factor"))


def _turned(config: Any, rotation: Mapping[str, Any]) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head_dim * rotation.get("partial_rotary_factor", 1.0))
