"""Which processes did a command start, and how are all of them held still, let go on, or ended?

Found by descent, and by session where a parent is gone. Linux.
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
    """A process, and not another that got its number later."""

    pid: int
    started: int


class _Entry(NamedTuple):
    known: Known
    parent: int
    session: int
    state: str


class ProcessTree:
    """All processes that come from one. Remembers those it has seen, to find them again as orphans."""

    def __init__(self, root: int) -> None:
        """`root` leads a session of its own."""
        self._root = root
        self._seen: set[Known] = set()

    def living(self) -> list[Known]:
        """Those there are now."""
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
        """Stop them where they are; one that was just being started is found by looking again."""
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
        """SIGTERM to the first one's process group; what is left after `patience_s` is killed. Returns
        whether all ended by themselves."""
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
