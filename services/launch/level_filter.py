"""Which of a child's lines are worth showing to whoever watches `baton serve`?"""

import re
from typing import Final

from baton.runtime.logging import LEVELS

HEAD: Final = re.compile(
    r'\d{4}-\d\d-\d\dT\S+Z (?P<text>[A-Z]+) |\{"time": "[^"]*", "level": "(?P<json>[a-z]+)"', re.ASCII
)


class LevelFilter:
    """Keeps log lines of at least one level, with the lines (tracebacks) that follow them.

    What precedes the first log line, such as a native library's greeting, is not kept.
    """

    def __init__(self, level: str) -> None:
        self._least = LEVELS[level]
        self._keeping = False

    def __call__(self, line: str) -> bool:
        head = HEAD.match(line)
        if head is not None:
            self._keeping = LEVELS.get((head["text"] or head["json"]).lower(), self._least) >= self._least
        return self._keeping
