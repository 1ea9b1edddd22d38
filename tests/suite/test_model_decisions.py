"""Test that the model has no copy of a decision of the product.

How a rank votes, what all ranks agree on, which move follows, when memory is safe and why a room ends is
decided in `baton.handover`, `baton.rooms` and `baton.fleet`. A model that decides such a thing by itself
would go on proving what the product does no more.

The test reads names. It cannot see a decision that the model writes in words of its own, such as a condition
on phases, or that it reaches by `getattr`. Reviews have to look for these.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MODEL: Final = Path(__file__).parents[1] / "model"
MODULES: Final = frozenset({"baton.rooms.ballot"})
"""Modules of the product of which the model uses nothing."""
NAMES: Final = frozenset(
    {
        *("Vote", "GATED", "SENDER_MOVES", "RECEIVER_MOVES", "LOCAL_MOVES"),  # votes, and what moves follow
        *("LOST", "REASONS"),  # why a room ends, and what follows from that
        *("Fenced", "Finished", "Landed", "Sealed"),  # evidence and proofs, which the sides add
    }
)
METHODS: Final = frozenset({"vote", "votes", "ending", "reasons", "digest", "settle", "retire", "conclude"})
"""Methods of rosters and rooms which `Turn` and the sides call."""
STATE: Final = frozenset({"phase", "cause", "proof", "finished", "stopping"})
"""Attributes of a room which the product alone sets."""
ALLOWED: Final = {
    "rank.py: settle": "of `Turn`",
    "space.py: REASONS": "of a law: a retraction is no failure",
    "space.py: ending": "of the same law",
}


def decisions(source: str) -> Iterator[str]:
    """Yield each name in a module's source whose use means that the module decides."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module)) if module in MODULES:
                yield module
            case ast.Name(id=name) if name in NAMES:
                yield name
            case ast.Call(func=ast.Attribute(attr=name)) if name in METHODS:
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) if name in STATE:
                yield name


def test_the_model_decides_nothing_by_itself() -> None:
    found = {f"{path.name}: {name}" for path in MODEL.glob("*.py") for name in decisions(path.read_text())}
    assert found == ALLOWED.keys()


def test_a_copy_of_a_turn_is_seen() -> None:
    copy = """
from baton.rooms.ballot import read_verdict
from baton.rooms.reasons import LOST

def turn(roster, agreed, side):
    votes = roster.votes(0, capacity)
    for room in roster:
        if votes[room.index] is Vote.ABORT:
            room.cause = Cause(LOST[side], "")
    return roster.settle(read_verdict(votes, agreed), 0)
"""
    assert sorted(decisions(copy)) == ["LOST", "Vote", "baton.rooms.ballot", "cause", "settle", "votes"]
    assert not list(decisions("def standing(room):\n    return room.phase, room.cause, room.settle\n"))
