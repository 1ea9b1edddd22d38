"""Counters that drop a key when its count is zero."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

K = TypeVar("K")


@contextmanager
def one_more(counts: Counter[K], key: K) -> Iterator[None]:
    """Count one more for a key, during a `with` block. A key whose count is zero is removed."""
    counts[key] += 1
    try:
        yield
    finally:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
