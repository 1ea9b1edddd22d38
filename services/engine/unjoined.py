"""Which experts lie one by one in quantised releases, and together in the library's definition?

Tools that quantise a linear layer at a time take such experts apart, and the library's mapping does not know
it: its own quantisers would compute with modules of another kind. Told so, it joins them as it does those of
other types.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from transformers import conversion_mapping as mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

LLAMA_4: Final = "llama4_text"
"""Each expert is turned, too: [out, in] in the files, [in, out] in the definition."""


@contextmanager
def joined_by_the_library() -> Iterator[None]:
    """Within it what the library is asked to load may lie either way."""
    known = mapping.get_checkpoint_conversion_mapping(LLAMA_4)
    if known is not None:  # a library that joins them by itself
        yield
        return
    experts = "feed_forward.experts"
    mapping.register_checkpoint_conversion_mapping(
        LLAMA_4,
        [
            WeightConverter(
                [f"{experts}.*.gate_proj.weight", f"{experts}.*.up_proj.weight"],
                f"{experts}.gate_up_proj",
                operations=[MergeModulelist(dim=0), Concatenate(dim=1), Transpose(1, 2)],
            ),
            WeightConverter(
                f"{experts}.*.down_proj.weight",
                f"{experts}.down_proj",
                operations=[MergeModulelist(dim=0), Transpose(1, 2)],
            ),
        ],
    )
    try:
        yield
    finally:
        mapping._checkpoint_conversion_mapping_cache.pop(LLAMA_4)
        mapping.USER_REGISTERED_MAPPINGS.discard(LLAMA_4)
