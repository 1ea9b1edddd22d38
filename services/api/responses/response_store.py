"""Store of responses that later requests may refer to.

A client may leave its history to the server: it names the response that it continues, or one of its items.
The newest responses are stored in memory, bounded by their number and by their bytes. Callers with API keys
find only their own. If there is no space, the API key with the largest share loses its least recently used
response. So no key takes the space of one that has less.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_core import from_json, to_json

FRAME_BYTES: Final = 512
"""Approximate memory of a stored response in addition to its JSON, bytes."""

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One stored response and the input items that it answers, both as JSON bytes."""

    answer: bytes
    items: bytes
    pieces: bytes
    """Sizes of the pieces in which each output item was streamed, as JSON."""

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.items) + len(self.pieces) + FRAME_BYTES

    def whole(self) -> dict[str, Any]:
        """Return the stored response as JSON, as it was sent to the client."""
        answer: dict[str, Any] = from_json(self.answer)
        return answer

    def sizes(self) -> list[list[list[int]]]:
        """Return, for each output item, the sizes of the pieces in which it was streamed: characters, then
        log-probabilities."""
        sizes: list[list[list[int]]] = from_json(self.pieces)
        return sizes

    def read(self) -> list[dict[str, Any]]:
        """Return the input items that the stored response answers, as JSON objects."""
        items: list[dict[str, Any]] = from_json(self.items)
        return items


@dataclass(slots=True)
class _Owned:
    """Stored responses of one owner (an API key), by id, the least recently used first."""

    answers: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0
    """Size of the owner's stored responses, bytes."""


class ResponseStore:
    """Store of the responses of one process, in memory. Used from one event loop."""

    def __init__(self, most: int, bytes_max: int) -> None:
        """Create an empty store.

        `most`: most responses; 0 stores none. `bytes_max`: most bytes of all responses.
        """
        self._most = most
        self._bytes_max = bytes_max
        self._owners: dict[bytes, _Owned] = {}
        self._count = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """Size of all stored responses, bytes."""
        return self._bytes

    @property
    def takes(self) -> bool:
        """Whether the store accepts any response at all."""
        return self._most > 0

    def keep(
        self,
        answer: Mapping[str, Any],
        items: Sequence[Item],
        owner: bytes,
        pieces: Sequence[Sequence[Sequence[int]]] = (),
    ) -> bool:
        """Store a response of the Responses API under its id, if there is space. Return whether it was
        stored.

        `answer`: the response as the client gets it. `items`: input items that it answers. `owner`:
        identifier of the caller. `pieces`: sizes of the pieces in which each output item was streamed.
        """
        kept = StoredResponse(to_json(answer), to_json(items), to_json(pieces))
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
        """Return the owner's stored response with this id, or None. The response becomes the most recently
        used one."""
        owned = self._owners.get(owner)
        if owned is None or id_ not in owned.answers:
            return None
        owned.answers.move_to_end(id_)
        return owned.answers[id_]

    def forget(self, id_: str, owner: bytes) -> bool:
        """Delete the owner's response with this id. Return whether it was stored."""
        if self.find(id_, owner) is None:
            return False
        self._remove(id_, owner)
        return True

    def _share(self, owned: "_Owned") -> float:
        """Return the fraction of the store that one owner's responses use. It is the larger one of two
        fractions: by number and by bytes."""
        return max(len(owned.answers) / self._most, owned.size / self._bytes_max)

    def _remove(self, id_: str, owner: bytes) -> None:
        owned = self._owners[owner]
        size = owned.answers.pop(id_).size
        owned.size -= size
        self._count, self._bytes = self._count - 1, self._bytes - size
        if not owned.answers:
            del self._owners[owner]
