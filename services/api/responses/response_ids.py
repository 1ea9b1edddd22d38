"""Ids of responses and of their items.

The id of an item contains the id of its response, so that the store finds the item.

No I/O, clock or threads.
"""

import re
from typing import Final

from baton.api.responses.response_store import Item, ResponseStore

ANSWER: Final = "resp_"
OF_ITEM: Final = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_\d{1,4}")


class ResponseIds:
    """Ids of one response and of its items."""

    def __init__(self, number: str) -> None:
        """Derive the ids from a number.

        `number`: 32 hexadecimal digits that cannot be guessed.
        """
        self._number = number
        self.answer = ANSWER + number

    def of_item(self, kind: str, place: int) -> str:
        """Return the id of an output item of the response.

        `kind`: prefix of the id: msg, rs or fc. `place`: index of the item in the response's output.
        """
        return f"{kind}_{self._number}_{place}"


def item_of(kept: ResponseStore, id_: str, owner: bytes) -> Item | None:
    """Return the item with this id from the store, or None if its response is not stored for this owner."""
    if (known := OF_ITEM.fullmatch(id_)) is None:
        return None
    if (found := kept.find(ANSWER + known[1], owner)) is None:
        return None
    return next((item for item in found.whole()["output"] if item["id"] == id_), None)
