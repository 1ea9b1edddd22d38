"""Short constructors of KV layouts for tests."""

from dataclasses import fields, replace
from typing import Any

from baton.pages.layout import KvGroup, KvLayout, full_group


def one_group(
    model: str,
    dtype: str,
    page_tokens: int,
    layers: tuple[int, ...],
    heads: tuple[int, ...],
    head_dim: int,
    **others: Any,
) -> KvLayout:
    """Return a layout of one KV group of full attention. `others`: further fields of the layout."""
    return KvLayout(model, (full_group(dtype, page_tokens, layers, heads, head_dim),), **others)


def changed(layout: KvLayout, **changes: Any) -> KvLayout:
    """`layout` but for fields of its own, or of all its groups."""
    of_groups = {each.name for each in fields(KvGroup)} & changes.keys()
    inner = {name: changes.pop(name) for name in of_groups}
    return replace(layout, groups=tuple(replace(each, **inner) for each in layout.groups), **changes)


def group_of(layout: KvLayout) -> KvGroup:
    """Return the only KV group of the layout."""
    (group,) = layout.groups
    return group
