"""Each rank's part of the smallest model that can be split, and the right content of every page.

The smallest model that can be split as the scope asks: a token a page, a number a head. A page is its strips,
a strip one head's vectors of one plane and layer, in the order that `baton.pages.layout` states. What lies
in a strip is known by one byte: of which room, which page of its prompt, which layer, head and plane.
"""

from collections.abc import Sequence
from functools import cache
from typing import Final

from baton.ids import RoomId
from baton.pages.layout import DTYPE_BYTES, GroupHead, KvLayout
from baton.pages.rank_layout import rank_layout
from baton.rooms.request import Request
from baton.topology import Topology
from tests.layouts import changed, one_group
from tests.model.scopes import Scope

STRIP: Final = DTYPE_BYTES["float16"]
"""Bytes of one strip of a page."""

FIRST_TOKEN: Final = 5
"""First token that every sender draws."""
STOP_TOKEN: Final = 6
VOCABULARY: Final = 8

_ANSWER_TOKENS: Final = 3
"""Tokens of a prompt's last page that belong to its answer, if the scope reserves no page for that."""
_HEADS_MAX: Final = 4
_PAGES_MAX: Final = 2
_LAYERS_MAX: Final = 2
_PLANES: Final = 2
_STRIPS_MAX: Final = _LAYERS_MAX * _HEADS_MAX * _PLANES


@cache
def layouts(scope: Scope, side: int) -> tuple[KvLayout, ...]:
    """Return the layouts of all ranks of a worker. Side 0 is prefill."""
    sizes = (scope.senders, scope.receivers)
    heads = scope.kv_heads or max(each.tensor for each in sizes)
    layers = max(each.pipeline for each in sizes)
    whole = one_group("model", "float16", 1, tuple(range(layers)), tuple(range(heads)), 1)
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
    return layout if scope.grows else changed(layout, page_tokens=1 + _ANSWER_TOKENS)


@cache
def strips(layout: KvLayout) -> tuple[int, ...]:
    """Return the (layer, head, plane) of each strip of a page, as one number."""
    return tuple(
        (layer * _HEADS_MAX + head) * _PLANES + plane
        for group in layout.groups
        for layer, head in group.places()
        for plane in range(len(group.planes))
    )


def content(room: RoomId, page: int, strip: int) -> int:
    """Return the right content of a strip of a room's `page`-th page. It is never 0, which means nothing."""
    return 1 + strip + _STRIPS_MAX * (page + _PAGES_MAX * (room - 1))


def told_sum(heads: Sequence[GroupHead]) -> int:
    """The checksum of a rank's pages, as its record tells it where the scope has `sums`."""
    return 1 + heads[0][1]
