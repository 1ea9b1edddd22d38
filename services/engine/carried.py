"""Has what the model library makes of a GGUF file all that the file says?

The library's reader passes over what it has no name for: how queries and keys are turned, how far a token
looks, and weights. What it makes of the rest would be another model.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFReader, ReaderTensor, get_tensor_name_map

from services.engine.gguf_file import strips_of
from services.engine.splits import BYTE_LEVEL, spaced, split_of

THETA: Final = 10_000.0
"""Of rotations, where a file does not say it."""
FREQUENCIES: Final = "rope_freqs"
FACTORS: Final = ("rope_factors_long", "rope_factors_short")
"""With the one before: tensors that are no weights, but divide the frequencies of the rotations."""
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
    """What the file says of its attention, and the library's `config` made of it does not: in a few words
    each."""
    says = header.says
    turns = _turns(config)
    found = []
    kind = str(says("rope.scaling.type") or "linear")
    factor = float(says("rope.scaling.factor") or says("rope.scale_linear") or 1.0)
    scaled = kind != "none" and (kind, factor) != ("linear", 1.0)
    if scaled and not any(_is(each, kind, factor) for each in turns):
        found.append(f"RoPE scaling ({kind}, factor {factor:g})")
    if header.scaled and not any(_is(each, "llama3") for each in turns):
        found.append(f"RoPE scaling (Llama 3's, {FREQUENCIES})")
    if any(name.startswith(FACTORS) for name in header.sizes) and not any(
        _is(each, "longrope") for each in turns
    ):
        found.append("RoPE scaling (longrope)")
    theta = float(says("rope.freq_base") or THETA)
    if turns and not any(math.isclose(each.get("rope_theta") or 0, theta, rel_tol=1e-6) for each in turns):
        found.append(f"a RoPE base of {theta:g}")
    turned = says("rope.dimension_count")
    if turned and turns and turned not in {_turned(config, each) for each in turns}:
        found.append(f"rotations of {turned} numbers of a head")
    window, context = says("attention.sliding_window"), says("context_length")
    looks_back = isinstance(window, int) and 0 < window < (context or math.inf)
    if looks_back and getattr(config, "sliding_window", None) != window:
        found.append(f"sliding-window attention ({window} tokens)")
    return found


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
