"""Which answers may a later request name, and whose are they?

A client may leave what was said before to the server: it names the answer that it goes on from, or one of its
items. So the newest are kept in memory, within two bounds; the one that was used longest ago goes first.
Whoever asks with an API key finds its own alone.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json, to_json

FRAME_BYTES: Final = 512
"""Of one that is kept, beside its texts, about."""

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """One answer, and all that its model read. As bytes, of which it is known how many they are."""

    owner: bytes
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


class KeptResponses:
    """Of one process. Used from one event loop."""

    def __init__(self, most: int, bytes_max: int) -> None:
        """`most` 0: none."""
        self._most = most
        self._bytes_max = bytes_max
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

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
        kept = KeptResponse(owner, to_json(answer), to_json(items))
        if kept.size > self._bytes_max:
            return False
        self._kept[answer["id"]] = kept
        self._bytes += kept.size
        while len(self._kept) > self._most or self._bytes > self._bytes_max:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size
        return True

    def find(self, id_: str, owner: bytes) -> KeptResponse | None:
        """The owner's answer of this id, if it is still kept. It is used by that."""
        kept = self._kept.get(id_)
        if kept is None or kept.owner != owner:
            return None
        self._kept.move_to_end(id_)
        return kept

    def forget(self, id_: str, owner: bytes) -> bool:
        """Whether there was one."""
        if (kept := self.find(id_, owner)) is None:
            return False
        del self._kept[id_]
        self._bytes -= kept.size
        return True
