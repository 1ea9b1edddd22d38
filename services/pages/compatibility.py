"""Check whether the KV pages of one worker's ranks can be written into those of another worker's ranks.

A difference that cannot be mapped raises an error that names the field. Properties of all pages, such as the
dtype, must be equal on every rank, group by group. One page size must be a multiple of the other. If pages
have an engine-specific encoding, both sizes must be equal. Layers and KV heads are compared as the union over
all ranks of a worker.
"""

from collections.abc import Sequence
from typing import Final

from baton.pages.errors import LayoutMismatch
from baton.pages.layout import PLAIN, KvGroup, KvLayout
from baton.topology import RANKS_MAX

_IDS_SHOWN: Final = 8
"""Most ids of layers or heads that the text of a layout error lists."""


def check_fit(senders: Sequence[KvLayout], receivers: Sequence[KvLayout]) -> None:
    """Check that the KV layouts of two workers fit together. Raises LayoutMismatch, which names the field.

    `senders`, `receivers`: one layout for each rank of the worker, in rank order.
    """
    if not all(1 <= len(each) <= RANKS_MAX for each in (senders, receivers)):
        counts = f"{len(senders)} of the sender", f"{len(receivers)} of the receiver"
        raise LayoutMismatch("ranks", *counts)
    first = senders[0]
    for side, layouts in (("sender", senders), ("receiver", receivers)):
        for rank, each in enumerate(layouts):
            whose = f"of {side} rank {rank}"
            for field in ("model", "quantize", "context_length"):
                _check_equal(field, getattr(first, field), "of sender rank 0", getattr(each, field), whose)
            _check_equal("groups", len(first.groups), "of sender rank 0", len(each.groups), whose)
            for one, another in zip(first.groups, each.groups, strict=True):
                for field in ("kind", "dtype", "planes", "encoding"):
                    _check_equal(field, _shown(one, field), "of sender rank 0", _shown(another, field), whose)
            for one, another in zip(layouts[0].groups, each.groups, strict=True):
                _check_equal("page_tokens", one.page_tokens, f"of {side} rank 0", another.page_tokens, whose)
    for number in range(len(first.groups)):
        _check_group(*([layout.groups[number] for layout in each] for each in (senders, receivers)))


def _check_group(senders: Sequence[KvGroup], receivers: Sequence[KvGroup]) -> None:
    source, target = senders[0].page_tokens, receivers[0].page_tokens
    if senders[0].encoding != PLAIN and source != target:
        raise LayoutMismatch(
            "page_tokens",
            f"{source} of the sender",
            f"{target} of the receiver: pages in encoding {senders[0].encoding} go whole",
        )
    if max(source, target) % min(source, target) or (senders[0].is_state and source != target):
        raise LayoutMismatch(
            "page_tokens", f"{source} of the sender", f"{target} of the receiver: neither is a multiple"
        )
    for field in ("layers", "heads"):
        ours, theirs = (_together(field, each) for each in (senders, receivers))
        if ours != theirs:
            alone = f"{_some(ours - theirs)} of the sender alone", f"{_some(theirs - ours)} of the receiver"
            raise LayoutMismatch(field, *alone)
    sent, filled = (_layer_heads(each) for each in (senders, receivers))
    for layer, head in sorted(sent ^ filled):
        side = "sender" if (layer, head) in sent else "receiver"
        raise LayoutMismatch("heads", f"head {head} of layer {layer}", f"held by the {side} alone")


def _check_equal(field: str, one: object, whose: str, another: object, others: str) -> None:
    if one != another:
        raise LayoutMismatch(field, f"{one} {whose}", f"{another} {others}")


def _shown(group: KvGroup, field: str) -> str:
    match field:
        case "kind":
            return group.kind.value
        case "planes":
            return ", ".join(map(str, group.planes))
        case _:
            return str(getattr(group, field))


def _together(field: str, groups: Sequence[KvGroup]) -> set[int]:
    return {number for group in groups for number in getattr(group, field)}


def _layer_heads(groups: Sequence[KvGroup]) -> set[tuple[int, int]]:
    """Return the set of (layer id, KV head id) pairs that these KV groups have together."""
    return {place for group in groups for place in group.places()}


def _some(ids: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ids)[:_IDS_SHOWN])) or "none"
    return f"{shown}, …" if len(ids) > _IDS_SHOWN else shown
