"""Counters whose keys vanish at zero."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

K = TypeVar("K")


@contextmanager
def one_more(counts: Counter[K], key: K) -> Iterator[None]:
    """Add one for a while. At zero the key is removed."""
    counts[key] += 1
    try:
        yield
    finally:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
