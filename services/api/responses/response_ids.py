"""By which ids are an answer and its items known?

An item's id has its answer's in it, so that an item is found by what is kept of answers.

Pure.
"""

import re
from typing import Final

from baton.api.responses.response_store import Item, ResponseStore

ANSWER: Final = "resp_"
OF_ITEM: Final = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_\d{1,4}")


class Names:
    """Of one answer."""

    def __init__(self, number: str) -> None:
        """`number`: 32 hexadecimal digits that nobody can guess."""
        self._number = number
        self.answer = ANSWER + number

    def of_item(self, kind: str, place: int) -> str:
        """`kind`: msg, rs or fc. `place`: among the answer's items."""
        return f"{kind}_{self._number}_{place}"


def item_of(kept: ResponseStore, id_: str, owner: bytes) -> Item | None:
    """The item of this id, if its answer is kept."""
    if (known := OF_ITEM.fullmatch(id_)) is None:
        return None
    if (found := kept.find(ANSWER + known[1], owner)) is None:
        return None
    return next((item for item in found.whole()["output"] if item["id"] == id_), None)
