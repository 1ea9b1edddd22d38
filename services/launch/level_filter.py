"""Filter of a child's log lines by level, for the terminal of `baton serve`."""

import re
from typing import Final

from baton.runtime.logging import LEVELS

LINE_START: Final = re.compile(
    r'\d{4}-\d\d-\d\dT\S+Z (?P<text>[A-Z]+) |\{"time": "[^"]*", "level": "(?P<json>[a-z]+)"', re.ASCII
)
"""Beginning of a log line, in either format, with its level."""


class LevelFilter:
    """Passes log lines of at least one level, with the lines that follow them, such as tracebacks.

    Lines before the first log line, such as a native library's greeting, do not pass.
    """

    def __init__(self, level: str) -> None:
        self._least = LEVELS[level]
        self._passes = False

    def __call__(self, line: str) -> bool:
        start = LINE_START.match(line)
        if start is not None:
            self._passes = LEVELS.get((start["text"] or start["json"]).lower(), self._least) >= self._least
        return self._passes
