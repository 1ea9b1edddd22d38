"""Experts that quantized releases store one by one, while the transformers implementation stores them
together.

Tools that quantize one linear layer at a time split such experts. The transformers library's mapping of
weights does not know this, because its own quantizers compute with other modules. With an extended mapping it
joins them, as it does for other model types.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from transformers import conversion_mapping as mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

SINGLE_EXPERTS: Final = {
    "llama4_text": ("feed_forward.experts", True),
    "qwen3_vl_moe": ("mlp.experts", False),
}
"""Experts that quantized files store one by one, by transformers' model type.

An entry has the path of the module of experts, and whether transformers stores their weights as [in, out].
Files with single experts have [out, in].
"""


@contextmanager
def joining_single_experts() -> Iterator[None]:
    """Make the transformers library accept both single and joined experts within the context."""
    before = {kind: mapping.get_checkpoint_conversion_mapping(kind) for kind in SINGLE_EXPERTS}
    for kind, (path, is_transposed) in SINGLE_EXPERTS.items():
        added = _joined(path, [Transpose(1, 2)] if is_transposed else [])
        mapping.register_checkpoint_conversion_mapping(kind, [*(before[kind] or ()), *added], overwrite=True)
    try:
        yield
    finally:
        for kind, known in before.items():
            mapping._checkpoint_conversion_mapping_cache.pop(kind)
            if known is not None:
                mapping.register_checkpoint_conversion_mapping(kind, known)
            mapping.USER_REGISTERED_MAPPINGS.discard(kind)


def _joined(experts: str, transposes: list[Any]) -> list[WeightConverter]:
    halves = [f"{experts}.*.{name}.weight" for name in ("gate_proj", "up_proj")]
    both = [MergeModulelist(dim=0), Concatenate(dim=1), *transposes]
    one = [MergeModulelist(dim=0), *transposes]
    return [
        WeightConverter(halves, f"{experts}.gate_up_proj", operations=both),
        WeightConverter(f"{experts}.*.down_proj.weight", f"{experts}.down_proj", operations=one),
    ]
