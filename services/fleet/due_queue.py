"""Which of those that wait equally long have waited for it?

A look costs what is due, however many wait. Time is an argument, and does not go back.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class DueQueue(Generic[K, V]):
    """Without a bound of its own: whoever forgets one tells it."""

    def __init__(self, after_ms: int) -> None:
        """`after_ms`: how long each waits."""
        self._after_ms = after_ms
        self._since: OrderedDict[K, tuple[int, V]] = OrderedDict()
        """When each began to wait, the first one first."""

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, key: K) -> bool:
        return key in self._since

    def enter(self, key: K, value: V, now_ms: int) -> None:
        """It waits from now on."""
        self._since.pop(key, None)
        self._since[key] = (now_ms, value)

    def leave(self, key: K) -> None:
        """It waits no more, if it did."""
        self._since.pop(key, None)

    def due(self, now_ms: int) -> list[V]:
        """They stay until they `leave`; who has waited longest comes first."""
        late: list[V] = []
        for since_ms, value in self._since.values():
            if now_ms < since_ms + self._after_ms:
                break
            late.append(value)
        return late
