"""By which frequencies are queries and keys turned, where a definition picks them by a sequence's length?

Keys lie turned in pages that sequences of any length begin with, and a step holds sequences of many lengths.
So a model is turned by the frequencies of one length: the context's. The library looks at each step again,
and finds the same ones.
"""

from collections.abc import Iterator
from typing import Any, Final

from baton.engine.loading.text_model import text_of
from baton.models.model_facts import UnsupportedModel

BY_LENGTH: Final = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
"""Of a longrope model: what counts up to its original positions, and what counts beyond them."""


def fix_rope_frequencies(name: str, config: Any, context_length: int) -> None:
    """Leave in the library's `config` of the model `name` the factors alone that sequences of
    `context_length` tokens are turned by. Raises UnsupportedModel where there are none for all lengths."""
    text = text_of(config)
    for turns in _turns(text):
        kind = turns.get("rope_type")
        if kind == "longrope":
            long = context_length > turns["original_max_position_embeddings"]
            for both in BY_LENGTH:
                if both[0] in turns:
                    turns.update(dict.fromkeys(both, turns[both[long]]))
        elif kind == "dynamic" and context_length > text.max_position_embeddings:
            raise UnsupportedModel(
                f"the model {name} ({config.model_type}) cannot be served with a context of {context_length}"
                " tokens: its position codes would depend on the longest sequence (dynamic RoPE scaling);"
                f" give --context-length {text.max_position_embeddings}, within which nothing is scaled"
            )


def _turns(text: Any) -> Iterator[dict[str, Any]]:
    """Of all layers, or of each type of them."""
    told = getattr(text, "rope_parameters", None) or {}
    yield from (each for each in (told, *told.values()) if isinstance(each, dict) and "rope_type" in each)
