"""Filter of a child process's log lines by level, for the terminal of `baton serve`."""

import re
from typing import Final

from baton.runtime.logging import LEVELS

LINE_START: Final = re.compile(
    r'\d{4}-\d\d-\d\dT\S+Z (?P<text>[A-Z]+) |\{"time": "[^"]*", "level": "(?P<json>[a-z]+)"', re.ASCII
)
"""Pattern of the beginning of a log line, as text or JSON, up to its level."""


class LevelFilter:
    """Filter that returns whether a line of output is shown, by the level of its log line.

    Lines that follow a log line, such as a traceback, are treated like it. Lines before the first log line,
    such as a native library's greeting, are not shown.
    """

    def __init__(self, level: str) -> None:
        self._least = LEVELS[level]
        self._passes = False

    def __call__(self, line: str) -> bool:
        start = LINE_START.match(line)
        if start is not None:
            self._passes = LEVELS.get((start["text"] or start["json"]).lower(), self._least) >= self._least
        return self._passes
