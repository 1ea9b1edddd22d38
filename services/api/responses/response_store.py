"""Store of responses that later requests may name.

A client may leave its history to the server: it names the response that it continues, or one of its items.
The newest responses are stored in memory, within two bounds. Callers with API keys find only their own. If
there is no space, the key with most of it loses its least recently used response, so that no key takes the
space of one that has less.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_core import from_json, to_json

FRAME_BYTES: Final = 512
"""Approximate bytes of a stored response in addition to its texts."""

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response and the items that its model read, as bytes, whose size is known."""

    answer: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.items) + FRAME_BYTES

    def whole(self) -> dict[str, Any]:
        """Return the response as it was sent."""
        answer: dict[str, Any] = from_json(self.answer)
        return answer

    def read(self) -> list[dict[str, Any]]:
        """Return the items that it answered."""
        items: list[dict[str, Any]] = from_json(self.items)
        return items


@dataclass(slots=True)
class _Owned:
    """Responses of one owner, the least recently used first."""

    answers: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0
    """Size in bytes."""


class ResponseStore:
    """The stored responses of one process. Used from one event loop."""

    def __init__(self, most: int, bytes_max: int) -> None:
        """`most`: number of responses; 0 stores none. `bytes_max`: their size."""
        self._most = most
        self._bytes_max = bytes_max
        self._owners: dict[bytes, _Owned] = {}
        self._count = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """Size of all responses in bytes."""
        return self._bytes

    @property
    def takes(self) -> bool:
        """Whether any response is stored at all."""
        return self._most > 0

    def keep(self, answer: Mapping[str, Any], items: Sequence[Item], owner: bytes) -> bool:
        """Store a response under its id, if there is space, and return whether it was stored. `items`: what
        it answered."""
        kept = StoredResponse(to_json(answer), to_json(items))
        if kept.size > self._bytes_max or not self._most:
            return False
        self.forget(answer["id"], owner)
        owned = self._owners.setdefault(owner, _Owned())
        owned.answers[answer["id"]] = kept
        owned.size += kept.size
        self._count, self._bytes = self._count + 1, self._bytes + kept.size
        while self._count > self._most or self._bytes > self._bytes_max:
            largest = max(self._owners, key=lambda each: self._share(self._owners[each]))
            self._remove(next(iter(self._owners[largest].answers)), largest)
        return owner in self._owners and answer["id"] in self._owners[owner].answers

    def find(self, id_: str, owner: bytes) -> StoredResponse | None:
        """Return the owner's response with this id, or None. It counts as used."""
        owned = self._owners.get(owner)
        if owned is None or id_ not in owned.answers:
            return None
        owned.answers.move_to_end(id_)
        return owned.answers[id_]

    def forget(self, id_: str, owner: bytes) -> bool:
        """Delete a response. Returns whether it was there."""
        if self.find(id_, owner) is None:
            return False
        self._remove(id_, owner)
        return True

    def _share(self, owned: "_Owned") -> float:
        """Return the part of the space that an owner has: the larger one of number and bytes."""
        return max(len(owned.answers) / self._most, owned.size / self._bytes_max)

    def _remove(self, id_: str, owner: bytes) -> None:
        owned = self._owners[owner]
        size = owned.answers.pop(id_).size
        owned.size -= size
        self._count, self._bytes = self._count - 1, self._bytes - size
        if not owned.answers:
            del self._owners[owner]
