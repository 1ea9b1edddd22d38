"""Detection of changes to files that are replaced while the process runs, such as certificates."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

LOOK_S: Final = 1.0

Stamp = tuple[tuple[int, int, int] | None, ...]


class FileChanges:
    """Detector of changes to some files, by their modification time, size and inode.

    Create it before the files are read, so that no change is missed. A check is cheap, because it looks at
    the files at most once a second.
    """

    def __init__(self, paths: Sequence[Path], now_s: Callable[[], float] = time.monotonic) -> None:
        self._paths = tuple(paths)
        self._now_s = now_s
        self._looked_s = now_s()
        self._stamp = self._look()

    def seen(self) -> bool:
        """Return whether a file has changed since the last call that returned True.

        Links are followed, because platforms replace a mounted secret by changing a link.
        """
        now_s = self._now_s()
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        before, self._stamp = self._stamp, self._look()
        return before != self._stamp

    def _look(self) -> Stamp:
        found: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
            except OSError:
                found.append(None)
        return tuple(found)
