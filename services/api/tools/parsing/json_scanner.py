"""Scanner that finds the strings in a growing JSON value. Marks of a tool call within them are plain text.

No I/O, clock or threads.
"""

import json
import re
from typing import Final

STRING_STOPS: Final = re.compile(r'["\\]')
PLAIN: Final = frozenset("0123456789+-._:,{}[]")
BEHIND_STRINGS: Final = frozenset(",:}]")


class JsonScanner:
    """Scanner that finds the strings in one JSON value.

    It skips the text before the value, and finds strings within brackets only.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._escaped = False
        self._behind_string = False
        self.in_string = False
        self.broken = False
        """Whether the text is not JSON, so that its strings cannot be found."""

    @property
    def is_open(self) -> bool:
        """Whether the text so far ends within the JSON value: it has begun and is incomplete."""
        return self.in_string or self._depth > 0

    def take_string(self, text: str) -> int:
        """Return how many characters at the start of `text` belong to the JSON string that is open."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            stop = STRING_STOPS.search(text, at)
            if stop is None:
                break
            at = stop.end()
            if stop[0] == '"':
                self.in_string, self._behind_string = False, True
                return at
            self._escaped = True
        return len(text)

    def take_plain(self, text: str) -> int:
        """Return how many characters of `text` come before the content of the next JSON string, including its
        opening quote.

        Stops before a character that cannot be JSON.
        """
        for at, char in enumerate(text):
            if char in "{[":
                self._depth += 1
            elif not self._depth:
                continue
            elif char in "}]":
                self._depth -= 1
            elif char == '"' and not self._behind_string:
                self.in_string = True
                return at + 1
            if not self._depth or char.isspace():
                continue
            if (char not in PLAIN and not char.isalpha()) or (
                self._behind_string and char not in BEHIND_STRINGS
            ):
                self.broken = True
                return at
            self._behind_string = False
        return len(text)


def is_json(text: str) -> bool:
    """Return whether the text is a JSON value."""
    try:
        json.dumps(json.loads(text), allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True
