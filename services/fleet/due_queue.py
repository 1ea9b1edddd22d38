"""Queue of entries that are all due after the same time, in the order in which they were entered.

Finding the due entries costs as much as there are of them, however many wait. Time is an argument, and does
not go back.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class DueQueue(Generic[K, V]):
    """Entries by key, each with the time at which it was entered. The queue has no bound: the caller removes
    the entries that it no longer needs."""

    def __init__(self, after_ms: int) -> None:
        """Make an empty queue. `after_ms`: time after which an entry is due, in milliseconds."""
        self._after_ms = after_ms
        self._since: OrderedDict[K, tuple[int, V]] = OrderedDict()
        """Time at which each entry was entered, in milliseconds, and its value, by key. The oldest entry is
        first."""

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, key: K) -> bool:
        return key in self._since

    def enter(self, key: K, value: V, now_ms: int) -> None:
        """Enter a value that is due after the queue's time. An earlier entry of the same key is replaced."""
        self._since.pop(key, None)
        self._since[key] = (now_ms, value)

    def leave(self, key: K) -> None:
        """Remove the entry of this key, if there is one."""
        self._since.pop(key, None)

    def due(self, now_ms: int) -> list[V]:
        """Return the values of the entries that are due now, oldest first. They stay in the queue until they
        `leave`."""
        late: list[V] = []
        for since_ms, value in self._since.values():
            if now_ms < since_ms + self._after_ms:
                break
            late.append(value)
        return late
