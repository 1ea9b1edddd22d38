"""Has what the model library makes of a GGUF file all that the file says?

The library's reader passes over what it has no name for: how queries and keys are turned, how far a token
looks, and weights. What it makes of the rest would be another model.
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

THETA: Final = 10_000.0
"""Of rotations, where a file does not say it."""
FREQUENCIES: Final = "rope_freqs"
FACTORS: Final = ("rope_factors_long", "rope_factors_short")
"""With the one before: tensors that are no weights, but divide the frequencies of the rotations."""
LENGTHS: Final = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
"""Factors of the length of what is rotated, which no configuration has."""
YARN: Final = "yarn"
YARN_SETTINGS: Final[Mapping[str, tuple[str, float]]] = {
    "rope.scaling.original_context_length": ("original_max_position_embeddings", 0),
    "rope.scaling.yarn_beta_fast": ("beta_fast", 32),
    "rope.scaling.yarn_beta_slow": ("beta_slow", 1),
}
"""YaRN's settings: what a configuration calls each, and its value where there is none."""
BASES: Final = ("rope.freq_base", "rope.global.freq_base")
"""llama.cpp's key for the base of the rotations, and Ollama's."""
LOCAL_BASES: Final = ("rope.freq_base_swa", "rope.local.freq_base")
"""The same in layers with a window."""
WINDOW: Final = "attention.sliding_window"
DEFAULT_WINDOWS: Final[Mapping[str, int]] = {"gemma2": 4096}
"""Windows that llama.cpp takes where a file has none, in tokens, by architecture."""
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
LOWER_HALF: Final = 0xFFFF
"""Of a float32's bits."""
ENDS: Final = ("eos", "eot", "eom")
"""Of the text, of a turn, and of a message that a tool answers."""


class Header:
    """What a GGUF file says beside the numbers of its weights."""

    def __init__(self, file: GGUFReader) -> None:
        self._file = file
        self.architecture = str(self._field("general.architecture"))

    def says(self, key: str) -> Any:
        """What is said under the architecture's `key`, if anything is."""
        return self._field(f"{self.architecture}.{key}")

    def of_tokenizer(self, key: str) -> Any:
        """What is said of the tokenizer under `key`, if anything is."""
        return self._field(f"tokenizer.ggml.{key}")

    @property
    def ends(self) -> list[int]:
        """Ids of the tokens that end an answer or a turn of it."""
        told = [self.of_tokenizer(f"{name}_token_id") for name in ENDS]
        return sorted({int(each) for each in told if each is not None})

    @property
    def sizes(self) -> Mapping[str, int]:
        """How many numbers each tensor has."""
        return {each.name: int(each.n_elements) for each in self._file.tensors}

    @property
    def scaled(self) -> bool:
        """There are frequencies, and not all are divided by one."""
        tensors = (each for each in self._file.tensors if each.name.startswith(FREQUENCIES))
        return any(number != 1 for each in tensors for number in each.data.flatten().tolist())

    @property
    def narrow(self) -> bool:
        """Every number of every tensor is one of bfloat16. Reads a tensor at a time."""
        return all(_is_narrow(each) for each in self._file.tensors)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the architecture, by key without its prefix."""
        prefix = f"{self.architecture}."
        keys = [key for key in self._file.fields if key.startswith(prefix)]
        return {key.removeprefix(prefix): self._field(key) for key in keys}

    def _field(self, key: str) -> Any:
        field = self._file.fields.get(key)
        return None if field is None else field.contents()


def _is_narrow(tensor: ReaderTensor) -> bool:
    """Whether each of its numbers is one of bfloat16: the upper half of a float32. Of what is quantised they
    are not, as a rule."""
    if tensor.tensor_type is GGMLQuantizationType.BF16:
        return True
    strips = strips_of(tensor.data, tensor.tensor_type)
    return not any((strip.view(np.uint32) & LOWER_HALF).any() for strip in strips)


def lost_settings(header: Header, config: Any) -> list[str]:
    """The keys of the file, with their values, that the library's `config` made of it does not have."""
    return [
        *_lost_scaling(header, config),
        *_lost_positions(header, config),
        *_lost_windows(header, config),
        *unread_settings(header, config),
    ]


def write_positions(header: Header, config: Any) -> None:
    """Write into `config` the rotations and windows that it can have and the library's reader passed over."""
    says, turns = header.says, getattr(config, "rope_parameters", None) or {}
    base, local = _base(header), _local_base(header)
    scaling, factor = _scaling(header)
    if FULL in turns and SLIDING in turns:
        turns[FULL]["rope_theta"] = base
        if local is not None:
            turns[SLIDING]["rope_theta"] = local
        if header.architecture == "gemma3" and scaling == "linear" and factor != 1:
            turns[FULL] |= {"rope_type": scaling, "factor": factor}  # llama.cpp scales no others
    elif "rope_theta" in turns:
        turns["rope_theta"] = base
    if config.model_type == "mistral" and not says(WINDOW):
        config.sliding_window = None


def _base(header: Header) -> float:
    return next((float(found) for key in BASES if (found := header.says(key))), THETA)


def _local_base(header: Header) -> float | None:
    """The base of the rotations in layers with a window, where it is another."""
    return next((float(found) for key in LOCAL_BASES if (found := header.says(key))), None)


def _scaling(header: Header) -> tuple[str, float]:
    kind = str(header.says("rope.scaling.type") or "linear")
    return kind, float(header.says("rope.scaling.factor") or header.says("rope.scale_linear") or 1.0)


def _lost_scaling(header: Header, config: Any) -> Iterator[str]:
    turns = _turns(config)
    kind, factor = _scaling(header)
    scaled = kind != "none" and (kind, factor) != ("linear", 1.0)
    matching = [each for each in turns if _is(each, kind, factor)]
    if scaled and not matching:
        keys = ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")
        yield from (shown(header, key) for key in keys if key in header.settings)
    if header.scaled and not any(_is(each, "llama3") for each in turns):
        yield f"RoPE scaling (Llama 3's, {FREQUENCIES})"
    if any(name.startswith(FACTORS) for name in header.sizes) and not any(
        _is(each, "longrope") for each in turns
    ):
        yield "RoPE scaling (longrope)"
    yield from (shown(header, key) for key in LENGTHS if header.says(key) not in (None, 0, 1))
    if scaled and kind == YARN:
        for key, (name, default) in YARN_SETTINGS.items():
            value = header.says(key)
            if value and any(not math.isclose(each.get(name) or default, value) for each in matching):
                yield shown(header, key)


def _lost_positions(header: Header, config: Any) -> Iterator[str]:
    told = getattr(config, "rope_parameters", None) or {}
    full, sliding = (told.get(each, told) for each in (FULL, SLIDING))
    for keys, turns in ((BASES, full), (LOCAL_BASES, sliding)):
        for key in keys:
            base = header.says(key)
            if base and ("rope_theta" in turns or key in LOCAL_BASES) and not _near(turns, base):
                yield shown(header, key)
    if "rope_theta" in full and not any(map(header.says, BASES)) and not _near(full, THETA):
        yield f"a RoPE base of {THETA:g}, which is meant where none is given"
    turned, local = header.says("rope.dimension_count"), header.says("rope.dimension_count_swa")
    if turned and "rope_theta" in full and turned != _turned(config, full):
        yield shown(header, "rope.dimension_count")
    if local and ("rope_theta" not in sliding or local != _turned(config, sliding)):
        yield shown(header, "rope.dimension_count_swa")


def _near(turns: Mapping[str, Any], base: float) -> bool:
    return math.isclose(turns.get("rope_theta") or 0, base, rel_tol=1e-6)


def _lost_windows(header: Header, config: Any) -> Iterator[str]:
    window, context = header.says(WINDOW), header.says("context_length")
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
    pattern = header.says(f"{WINDOW}_pattern")
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
    """Which layers have a window: each but every so many-th, or as listed."""
    if isinstance(value, list):
        return [bool(each) for each in value]
    period = int(value)
    return [period == 0 or layer % period < period - 1 for layer in range(layers)]


def lost_of_tokenizer(header: Header) -> list[str]:
    """What the file says of its tokenizer, and the library's reader passes over: in a few words each."""
    split = header.of_tokenizer("pre")
    found = []
    if header.of_tokenizer("model") == BYTE_LEVEL and split_of(header) is None:
        found.append(
            "how text is split for its tokens" + (f" ({split})" if split else ", which it does not name")
        )
    if spaced(header) and header.of_tokenizer("add_space_prefix") is False:
        found.append("no space before a text (add_space_prefix)")
    return found


def lost_weights(header: Header, model: Any) -> list[str]:
    """Some of the file's weights for which the library's `model`, which lacks none, has no place."""
    sizes = {name: size for name, size in header.sizes.items() if not name.startswith("rope_")}
    if getattr(model.config, "tie_word_embeddings", False):
        sizes.pop("output.weight", None)
    state: dict[str, Any] = model.state_dict()
    if sum(sizes.values()) <= sum({each.data_ptr(): each.numel() for each in state.values()}.values()):
        return []
    kinds = [kind for kind, name in MODEL_ARCH_NAMES.items() if name == header.architecture]
    names = get_tensor_name_map(kinds[0], header.says("block_count")) if kinds else None
    placed = set() if names is None else {names.get_name(each, (".weight", ".bias")) for each in state}
    return [name for name in sizes if name not in placed]


def _turns(config: Any) -> list[Mapping[str, Any]]:
    """The ways in which queries and keys are turned: none, one, or one for each type of layers."""
    told = getattr(config, "rope_parameters", None) or {}
    return [each for each in (told, *told.values()) if isinstance(each, dict) and "rope_theta" in each]


def _is(turns: Mapping[str, Any], kind: str, factor: float | None = None) -> bool:
    return turns.get("rope_type") == kind and factor in (None, turns.get("factor"))


def _turned(config: Any, turns: Mapping[str, Any]) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head_dim * turns.get("partial_rotary_factor", 1.0))
