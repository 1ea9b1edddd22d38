"""Which answers may a later request name, and whose are they?

A client may leave what was said before to the server: it names the answer that it goes on from, or one of its
items. So the newest are kept in memory, within two bounds. Whoever asks with an API key finds its own alone.
Where there is no space, the key that has most of it loses the answer that it used longest ago: none takes the
space of one that has less.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_core import from_json, to_json

FRAME_BYTES: Final = 512
"""Of one that is kept, beside its texts, about."""

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One answer, and all that its model read. As bytes, of which it is known how many they are."""

    answer: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.items) + FRAME_BYTES

    def whole(self) -> dict[str, Any]:
        """As it was answered."""
        answer: dict[str, Any] = from_json(self.answer)
        return answer

    def read(self) -> list[dict[str, Any]]:
        """The items that it answered."""
        items: list[dict[str, Any]] = from_json(self.items)
        return items


@dataclass(slots=True)
class _Owned:
    """Answers of one owner, the one used longest ago first."""

    answers: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0
    """Bytes."""


class ResponseStore:
    """Of one process. Used from one event loop."""

    def __init__(self, most: int, bytes_max: int) -> None:
        """`most` 0: none."""
        self._most = most
        self._bytes_max = bytes_max
        self._owners: dict[bytes, _Owned] = {}
        self._count = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """Bytes."""
        return self._bytes

    @property
    def takes(self) -> bool:
        """Whether any is kept at all."""
        return self._most > 0

    def keep(self, answer: Mapping[str, Any], items: Sequence[Item], owner: bytes) -> bool:
        """Whether there is space for `answer`, which is kept under its id then; `items` are what it
        answered."""
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
        """The owner's answer of this id, if it is still kept. It is used by that."""
        owned = self._owners.get(owner)
        if owned is None or id_ not in owned.answers:
            return None
        owned.answers.move_to_end(id_)
        return owned.answers[id_]

    def forget(self, id_: str, owner: bytes) -> bool:
        """Whether there was one."""
        if self.find(id_, owner) is None:
            return False
        self._remove(id_, owner)
        return True

    def _share(self, owned: "_Owned") -> float:
        """Part of the space that an owner has: of the number or of the bytes, whichever is more."""
        return max(len(owned.answers) / self._most, owned.size / self._bytes_max)

    def _remove(self, id_: str, owner: bytes) -> None:
        owned = self._owners[owner]
        size = owned.answers.pop(id_).size
        owned.size -= size
        self._count, self._bytes = self._count - 1, self._bytes - size
        if not owned.answers:
            del self._owners[owner]
