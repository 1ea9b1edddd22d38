"""Exits of a worker's rank processes, and which rank caused the others to exit."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from baton.launch.child import Child, describe_exit
from baton.runtime.errors import EXIT_FAILED, EXIT_GROUP, StartupError

GRACE_S: Final = 3.0
"""Seconds that the other ranks get, after one has failed, to notice it, end their streams and log
the reason."""


class RankEnded(StartupError):
    """A rank of the worker ended with this exit code, and the launcher does not start it again."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class GroupExit:
    """Exits of all ranks of a worker, for one incarnation."""

    codes: Mapping[Child, int]
    """Exit code of each rank's child process, by process, in the order in which the processes ended."""
    killed: frozenset[Child]
    """Processes of ranks that the launcher killed because they had not ended in time."""
    started: bool
    """Whether the worker had started completely, so that it may have had rooms."""

    @property
    def is_orderly(self) -> bool:
        """Whether every rank's process ended with exit code 0."""
        return not any(self.codes.values())

    @property
    def first(self) -> Child:
        """Rank that caused the worker to end.

        It is the first one that failed by itself. A rank that does not blame another one (EXIT_GROUP) comes
        before those that do.
        """
        failed = [child for child, code in self.codes.items() if code and child not in self.killed]
        own = [child for child in failed if self.codes[child] != EXIT_GROUP]
        return [*own, *failed, *self.killed, *self.codes][0]

    @property
    def cause(self) -> str:
        """Name and exit of the rank that caused the worker to end, as text."""
        return f"{self.first.name} {describe_exit(self.codes[self.first])}"


async def collect(
    exits: dict["asyncio.Task[int]", Child], codes: dict[Child, int], left_s: float | None
) -> None:
    """Wait for rank processes to exit, at most `left_s` seconds, and add their exit codes to `codes` in
    order.

    Once a rank has failed, the others get at most GRACE_S.
    """
    loop = asyncio.get_running_loop()
    until_s = None if left_s is None else loop.time() + left_s
    while len(codes) < len(exits):
        left = None if until_s is None else max(until_s - loop.time(), 0)
        waiting = [task for task, child in exits.items() if child not in codes]
        done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return
        for task in done:
            codes[exits[task]] = task.result()
            if until_s is not None and task.result() != 0:
                until_s = min(until_s, loop.time() + GRACE_S)


def failure_of(ended: GroupExit) -> RankEnded:
    """Return the error with which the launcher ends, after the ranks have ended as in `ended`."""
    reason, code = ended.first.startup_error(), ended.codes[ended.first]
    if reason is not None:
        return RankEnded(f"{ended.first.name}: {reason}", code if code > 0 else EXIT_FAILED)
    when = "" if ended.started else " before the worker had started"
    return RankEnded(f"{ended.cause}{when}", EXIT_FAILED)
