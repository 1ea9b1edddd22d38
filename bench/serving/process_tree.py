"""Processes that a command started: stop, continue and end all of them.

They are found by descent, and by session if a parent has ended. Linux only.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

SEARCHES_MAX: Final = 10
POLL_S: Final = 0.05


class Known(NamedTuple):
    """Process id with its start time, which tells it from a later process of the same number."""

    pid: int
    started: int


class _Entry(NamedTuple):
    known: Known
    parent: int
    session: int
    state: str


class ProcessTree:
    """All processes descended from one. Processes seen once are found again as orphans."""

    def __init__(self, root: int) -> None:
        """`root`: id of the first process, which leads a session."""
        self._root = root
        self._seen: set[Known] = set()

    def living(self) -> list[Known]:
        """Return the processes that run now."""
        entries = [each for each in _entries() if each.state not in "ZX"]
        sessions, pids = {self._root}, {self._root}
        members: set[Known] = set()
        while True:
            found = {
                each.known
                for each in entries
                if each.known in self._seen
                or each.known.pid in pids
                or each.parent in pids
                or each.session in sessions
            }
            if found == members:
                self._seen |= found
                return sorted(found)
            members = found
            pids |= {each.pid for each in found}
            sessions |= {each.session for each in entries if each.known in found and each.session in pids}

    def pause(self) -> None:
        """Stop all of them. A process that was being started is found by the next search."""
        stopped: set[Known] = set()
        for _ in range(SEARCHES_MAX):
            running = set(self.living()) - stopped
            if not running:
                return
            self._send(running, signal.SIGSTOP)
            stopped |= running

    def go_on(self) -> None:
        self._send(set(self.living()), signal.SIGCONT)

    def end(self, patience_s: float) -> bool:
        """Send SIGTERM to the first process's group, and kill what is left after `patience_s` seconds.
        Returns whether all ended by themselves."""
        self.go_on()
        with suppress(ProcessLookupError):
            os.killpg(self._root, signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while self.living() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        clean = True
        for _ in range(SEARCHES_MAX):
            left = set(self.living())
            if not left:
                break
            clean = False
            self._send(left, signal.SIGKILL)
            time.sleep(POLL_S)
        return clean

    def _send(self, processes: set[Known], number: signal.Signals) -> None:
        for each in processes:
            with suppress(ProcessLookupError):
                os.kill(each.pid, number)


def _entries() -> Iterator[_Entry]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                yield _Entry(Known(int(folder.name), int(words[19])), int(words[1]), int(words[3]), words[0])
