"""Counters whose keys vanish at zero."""

from collections import Counter
from typing import TypeVar

K = TypeVar("K")


def decrement(counts: Counter[K], key: K) -> None:
    """Subtract one, and remove the key at zero."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
