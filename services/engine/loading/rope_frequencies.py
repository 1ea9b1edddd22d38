"""Rotary frequencies of models that choose them by the length of a sequence.

Pages hold rotated keys, sequences of any length share them, and a step has sequences of many lengths. So one
set of frequencies is used: those for the context length, the most tokens that a sequence may have. The
transformers library chooses again in each step, and finds the same ones.
"""

from collections.abc import Iterator
from typing import Any, Final

from baton.engine.loading.text_model import text_of
from baton.models.model_facts import UnsupportedModel

BY_LENGTH: Final = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
"""Pairs of longrope settings that exclude each other: one for sequences up to the original context, one for
longer ones."""


def fix_rope_frequencies(name: str, config: Any, context_length: int) -> None:
    """Leave in the transformers `config` only the rotary factors for the model's longest sequences.

    `context_length`: most tokens of a sequence. Raises UnsupportedModel if no factors are valid for all
    lengths.
    """
    text = text_of(config)
    for rotation in _rotations(text):
        kind = rotation.get("rope_type")
        if kind == "longrope":
            long = context_length > rotation["original_max_position_embeddings"]
            for both in BY_LENGTH:
                if both[0] in rotation:
                    rotation.update(dict.fromkeys(both, rotation[both[long]]))
        elif kind == "dynamic" and context_length > text.max_position_embeddings:
            raise UnsupportedModel(
                f"the model {name} ({config.model_type}) cannot be served with a context of {context_length}"
                " tokens: its position codes would depend on the longest sequence (dynamic RoPE scaling);"
                f" give --context-length {text.max_position_embeddings}, within which nothing is scaled"
            )


def _rotations(text: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary settings of a configuration as dictionaries: one for all layers, or one for each layer
    type."""
    settings = getattr(text, "rope_parameters", None) or {}
    yield from (
        each for each in (settings, *settings.values()) if isinstance(each, dict) and "rope_type" in each
    )
