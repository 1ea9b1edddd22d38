"""Each rank's part of the smallest model that can be split, and the right content of every page.

The smallest model that can be split as the scope asks: a token a page, a number a head. A page is its strips,
a strip one head's vectors of one plane and layer, in the order that `baton.pages.layout` states. What lies
in a strip is known by one byte: of which room, which page of its prompt, which layer, head and plane. With
states, every second layer has one in place of pages: one page, of one strip a layer, for the whole prompt.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from baton.ids import PageTables, RoomId
from baton.pages.layout import DTYPE_BYTES, GroupHead, KvLayout, KvPlane, state_group
from baton.pages.rank_layout import rank_layout
from baton.rooms.request import Request
from baton.topology import Topology
from tests.layouts import one_group
from tests.model.scopes import Scope

STRIP: Final = DTYPE_BYTES["float16"]
"""Bytes of one strip of a page."""

FIRST_TOKEN: Final = 5
"""First token that every sender draws."""
STOP_TOKEN: Final = 6
VOCABULARY: Final = 8

CONTEXT: Final = 64
"""Context length: the tokens that a state stands for at most."""
GROUP_PAGES: Final = 50
"""More pages than a rank has of one KV group."""
_ANSWER_TOKENS: Final = 3
"""Tokens of a prompt's last page that belong to its answer, if the scope reserves no page for that."""
_HEADS_MAX: Final = 4
_PAGES_MAX: Final = 2
_LAYERS_MAX: Final = 4
_PLANES: Final = 2
_STRIPS_MAX: Final = _LAYERS_MAX * _HEADS_MAX * _PLANES


@cache
def layouts(scope: Scope, side: int) -> tuple[KvLayout, ...]:
    """Return the layouts of all ranks of a worker. Side 0 is prefill."""
    sizes = (scope.senders, scope.receivers)
    heads = scope.kv_heads or max(each.tensor for each in sizes)
    layers = max(each.pipeline for each in sizes)
    whole = one_group("model", "float16", 1, tuple(range(layers)), tuple(range(heads)), 1)
    if scope.states:
        full = replace(whole.groups[0], layers=tuple(range(0, 2 * layers, 2)))
        states = state_group("float16", CONTEXT, tuple(range(1, 2 * layers, 2)), (0,), (KvPlane("state", 1),))
        whole = replace(whole, groups=(full, states))
    topology: Topology = sizes[side]
    return tuple(rank_layout(whole, topology, rank) for rank in range(topology.ranks))


@cache
def asked(scope: Scope, room: RoomId) -> Request:
    """Return the request of a room: a prompt of one token per page, and choices that are drawn until
    STOP_TOKEN."""
    return Request(
        f"request-{room}",
        (room if scope.cached else 1,) * scope.prompt_pages,
        scope.tokens + 1,
        stop_token_ids=(STOP_TOKEN,),
        further_seeds=(0,) * (scope.choices - 1),
        arrived_ms=scope.rooms - room if scope.aged else 0,
    )


@cache
def reserving(scope: Scope, layout: KvLayout) -> KvLayout:
    """Return how a receiver counts the pages of a prompt and its answer."""
    if scope.grows:
        return layout
    full, *states = layout.groups
    return replace(layout, groups=(replace(full, page_tokens=1 + _ANSWER_TOKENS), *states))


@cache
def strips(layout: KvLayout) -> tuple[tuple[int, ...], ...]:
    """Return the (layer, head, plane) of each strip of a page as one number, by KV group."""
    return tuple(
        tuple(
            (layer * _HEADS_MAX + head) * _PLANES + plane
            for layer, head in group.places()
            for plane in range(len(group.planes))
        )
        for group in layout.groups
    )


def page_key(group: int, page: int) -> int:
    """Return the number of a page among those of all KV groups of a rank."""
    return group * GROUP_PAGES + page


def page_keys(tables: PageTables) -> list[int]:
    """Return the numbers of the pages in `tables` among those of all KV groups."""
    return [page_key(group, page) for group, table in enumerate(tables) for page in table]


def content(room: RoomId, page: int, strip: int) -> int:
    """Return the right content of a strip of a room's `page`-th page. It is never 0, which means nothing."""
    return 1 + strip + _STRIPS_MAX * (page + _PAGES_MAX * (room - 1))


def told_sum(heads: Sequence[GroupHead]) -> int:
    """The checksum of a rank's pages, as its record tells it where the scope has `sums`."""
    return 1 + heads[0][1]
