"""Counts of a decode worker's unfinished business with its senders, for tests."""

from typing import Any

from baton.decode.prefill_peers import LeaderPeers, Peers
from baton.ids import Incarnation


def asking(peers: Peers) -> int:
    """Return the number of senders that have not answered a connect request or a grant."""
    return sum(link.session.is_asking for link in links_of(peers).values())


def closing(peers: Peers) -> int:
    """Return the number of closed rooms whose sender has not confirmed that its writes ended."""
    return sum(len(link.session.closes) for link in links_of(peers).values())


def needed(peers: Peers) -> set[Incarnation]:
    """Return the senders to which a channel is kept open."""
    return {incarnation for incarnation, link in links_of(peers).items() if link.session.is_needed}


def links_of(peers: Peers) -> dict[Incarnation, Any]:
    """Return the links to senders that the worker has something to say to, by incarnation."""
    assert isinstance(peers, LeaderPeers), "a rank that does not lead asks nobody"
    return dict(peers.links)
