"""Ids of responses and of their items.

The id of an item contains its response's, so that the store finds it.

Pure.
"""

import re
from typing import Final

from baton.api.responses.response_store import Item, ResponseStore

ANSWER: Final = "resp_"
OF_ITEM: Final = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_\d{1,4}")


class ResponseIds:
    """The ids of one response."""

    def __init__(self, number: str) -> None:
        """`number`: 32 hexadecimal digits that nobody can guess."""
        self._number = number
        self.answer = ANSWER + number

    def of_item(self, kind: str, place: int) -> str:
        """Return the id of an item. `kind`: msg, rs or fc. `place`: index among the response's items."""
        return f"{kind}_{self._number}_{place}"


def item_of(kept: ResponseStore, id_: str, owner: bytes) -> Item | None:
    """Return the item with this id, if its response is stored."""
    if (known := OF_ITEM.fullmatch(id_)) is None:
        return None
    if (found := kept.find(ANSWER + known[1], owner)) is None:
        return None
    return next((item for item in found.whole()["output"] if item["id"] == id_), None)
