"""The diagram of page states in the docs, drawn from the transition table."""

from typing import Final

from baton.pages.pool import PAGE_MOVES, PageState

_WHY: Final = {
    (PageState.FREE, PageState.RESERVED): "reserve",
    (PageState.RESERVED, PageState.EXPOSED): "expose: a peer is about to be told",
    (PageState.RESERVED, PageState.COMMITTED): "commit: for tokens still to be drawn",
    (PageState.RESERVED, PageState.FREE): "release: no peer was told",
    (PageState.EXPOSED, PageState.COMMITTED): "commit: sealed on every rank",
    (PageState.EXPOSED, PageState.QUARANTINED): "quarantine: the room failed",
    (PageState.COMMITTED, PageState.FREE): "release: the sequence ended",
    (PageState.COMMITTED, PageState.CACHED): "cache: the last sequence that read it ended",
    (PageState.CACHED, PageState.COMMITTED): "commit: a sequence begins with it",
    (PageState.CACHED, PageState.FREE): "release: its space is needed",
    (PageState.QUARANTINED, PageState.FREE): "release: proof that no write can land",
}


def page_states() -> str:
    """A Mermaid state diagram of a page's, and a metadata slot's, states."""
    order = list(PageState)
    lines = ["stateDiagram-v2", f"    [*] --> {PageState.FREE.value}"]
    for before, after in sorted(PAGE_MOVES, key=lambda move: (order.index(move[0]), order.index(move[1]))):
        lines.append(f"    {before.value} --> {after.value}: {_WHY[before, after]}")
    return "\n".join(lines)
