"""Reading of single keys from a terminal, while `baton top` redraws the screen."""

import os
import select
import sys
import termios
import time
import tty
from contextlib import suppress
from types import TracebackType
from typing import Any, Self


class Keyboard:
    """Context manager in which standard input is read key by key, without echo.

    If standard input is no terminal, there are no keys.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        with suppress(termios.error, OSError, ValueError):
            if sys.stdin.isatty():
                self._before = termios.tcgetattr(sys.stdin)
                tty.setcbreak(sys.stdin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def wait(self, most_s: float) -> str:
        """Return the next key that is pressed, or an empty text after `most_s` seconds."""
        if self._before is None:
            time.sleep(most_s)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], most_s)
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""
