"""Which experts lie one by one in quantised releases, and together in the library's definition?

Tools that quantise a linear layer at a time take such experts apart, and the library's mapping does not know
it: its own quantisers would compute with modules of another kind. Told so, it joins them as it does those of
other types.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from transformers import conversion_mapping as mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

TURNED: Final = {"llama4_text": ("feed_forward.experts", True), "qwen3_vl_moe": ("mlp.experts", False)}
"""By the library's type: where experts are, and whether each is [in, out] in the definition. In such files it
is [out, in]."""


@contextmanager
def joining_single_experts() -> Iterator[None]:
    """Within it what the library is asked to load may lie either way."""
    before = {kind: mapping.get_checkpoint_conversion_mapping(kind) for kind in TURNED}
    for kind, (place, turned) in TURNED.items():
        added = _joined(place, [Transpose(1, 2)] if turned else [])
        mapping.register_checkpoint_conversion_mapping(kind, [*(before[kind] or ()), *added], overwrite=True)
    try:
        yield
    finally:
        for kind, known in before.items():
            mapping._checkpoint_conversion_mapping_cache.pop(kind)
            if known is not None:
                mapping.register_checkpoint_conversion_mapping(kind, known)
            mapping.USER_REGISTERED_MAPPINGS.discard(kind)


def _joined(experts: str, turns: list[Any]) -> list[WeightConverter]:
    halves = [f"{experts}.*.{name}.weight" for name in ("gate_proj", "up_proj")]
    both = [MergeModulelist(dim=0), Concatenate(dim=1), *turns]
    one = [MergeModulelist(dim=0), *turns]
    return [
        WeightConverter(halves, f"{experts}.gate_up_proj", operations=both),
        WeightConverter(f"{experts}.*.down_proj.weight", f"{experts}.down_proj", operations=one),
    ]
