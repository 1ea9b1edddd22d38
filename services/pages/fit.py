"""Can the ranks of one worker hand over to those of another? What cannot be mapped is refused by its field.

What every page of either side must be like is compared rank by rank, the two page sizes by whether one is a
multiple of the other, and layers and heads by what each side's ranks hold together.
"""

from collections.abc import Sequence
from itertools import product
from typing import Final

from services.pages.errors import LayoutMismatch
from services.pages.layout import KvLayout
from services.pages.topology import RANKS_MAX

_IDS_TOLD: Final = 8
"""Of layers or heads, in an error."""


def check_fit(senders: Sequence[KvLayout], receivers: Sequence[KvLayout]) -> None:
    """Both in rank order. Raises LayoutMismatch by the field."""
    if not all(1 <= len(each) <= RANKS_MAX for each in (senders, receivers)):
        counts = f"{len(senders)} of the sender", f"{len(receivers)} of the receiver"
        raise LayoutMismatch("ranks", *counts)
    for side, layouts in (("sender", senders), ("receiver", receivers)):
        for rank, each in enumerate(layouts):
            for field in ("model", "dtype", "quantize", "head_dim", "context_length"):
                _check_equal(field, "sender", senders[0], f"{side} rank {rank}", each)
            _check_equal("page_tokens", side, layouts[0], f"{side} rank {rank}", each)
    source, target = senders[0].page_tokens, receivers[0].page_tokens
    if max(source, target) % min(source, target):
        raise LayoutMismatch(
            "page_tokens", f"{source} of the sender", f"{target} of the receiver: neither is a multiple"
        )
    for field in ("layers", "kv_heads"):
        ours, theirs = (_together(field, each) for each in (senders, receivers))
        if ours != theirs:
            alone = f"{_some(ours - theirs)} of the sender alone", f"{_some(theirs - ours)} of the receiver"
            raise LayoutMismatch(field, *alone)
    sent, filled = (_held(each) for each in (senders, receivers))
    for layer, head in sorted(sent ^ filled):
        side = "sender" if (layer, head) in sent else "receiver"
        raise LayoutMismatch("kv_heads", f"head {head} of layer {layer}", f"held by the {side} alone")


def _check_equal(field: str, side: str, first: KvLayout, whose: str, other: KvLayout) -> None:
    one, another = getattr(first, field), getattr(other, field)
    if one != another:
        raise LayoutMismatch(field, f"{one} of {side} rank 0", f"{another} of {whose}")


def _together(field: str, layouts: Sequence[KvLayout]) -> set[int]:
    return {number for layout in layouts for number in getattr(layout, field)}


def _held(layouts: Sequence[KvLayout]) -> set[tuple[int, int]]:
    """(layer, head)"""
    return {place for layout in layouts for place in product(layout.layers, layout.kv_heads)}


def _some(ids: set[int]) -> str:
    told = ", ".join(map(str, sorted(ids)[:_IDS_TOLD])) or "none"
    return f"{told}, …" if len(ids) > _IDS_TOLD else told
