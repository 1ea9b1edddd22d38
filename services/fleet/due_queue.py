"""Queue of entries that all wait equally long, and are due in the order in which they came.

A look costs as much as there are due entries, however many wait. Time is an argument, and does not go back.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class DueQueue(Generic[K, V]):
    """Entries by key, with the time since when each waits. It has no bound of its own: the caller removes
    what it forgets."""

    def __init__(self, after_ms: int) -> None:
        """`after_ms`: how long each entry waits before it is due."""
        self._after_ms = after_ms
        self._since: OrderedDict[K, tuple[int, V]] = OrderedDict()
        """Time since when each entry waits, and its value, the first one first."""

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, key: K) -> bool:
        return key in self._since

    def enter(self, key: K, value: V, now_ms: int) -> None:
        """Let an entry wait from now on. An earlier wait of the same key is replaced."""
        self._since.pop(key, None)
        self._since[key] = (now_ms, value)

    def leave(self, key: K) -> None:
        """Remove an entry, if it is there."""
        self._since.pop(key, None)

    def due(self, now_ms: int) -> list[V]:
        """Return the values of due entries, the longest wait first. They stay until they `leave`."""
        late: list[V] = []
        for since_ms, value in self._since.values():
            if now_ms < since_ms + self._after_ms:
                break
            late.append(value)
        return late
