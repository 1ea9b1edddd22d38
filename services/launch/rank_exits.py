"""How did the ranks of one worker end, and which of them is the reason?"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from baton.launch.child import Child, describe_exit
from baton.runtime.errors import EXIT_FAILED, EXIT_GROUP, StartupError

GRACE_S: Final = 3.0
"""For the other ranks, after one has failed: to notice, to end their streams, and to say why."""


class RankEnded(StartupError):
    """A rank ended, with this exit code, and is not started again from here."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Ended:
    """How the ranks of one incarnation ended, in the order of their ends."""

    codes: Mapping[Child, int]
    killed: frozenset[Child]
    """Those that did not end by themselves."""
    started: bool
    """Turns had gone on: there was something to finish."""

    @property
    def in_order(self) -> bool:
        return not any(self.codes.values())

    @property
    def first(self) -> Child:
        """The rank that is the reason, or tells it: the first that failed by itself, and rather one that
        does not say that it was another."""
        failed = [child for child, code in self.codes.items() if code and child not in self.killed]
        own = [child for child in failed if self.codes[child] != EXIT_GROUP]
        return [*own, *failed, *self.killed, *self.codes][0]

    @property
    def why(self) -> str:
        return f"{self.first.name} {describe_exit(self.codes[self.first])}"


async def collect(
    ends: dict["asyncio.Task[int]", Child], codes: dict[Child, int], left_s: float | None
) -> None:
    """Note the ends in their order, for `left_s` at most; once a rank has failed the others get GRACE_S."""
    loop = asyncio.get_running_loop()
    until_s = None if left_s is None else loop.time() + left_s
    while len(codes) < len(ends):
        left = None if until_s is None else max(until_s - loop.time(), 0)
        waiting = [task for task, child in ends.items() if child not in codes]
        done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return
        for task in done:
            codes[ends[task]] = task.result()
            if until_s is not None and task.result() != 0:
                until_s = min(until_s, loop.time() + GRACE_S)


def death(ended: Ended) -> RankEnded:
    why, code = ended.first.own_words(), ended.codes[ended.first]
    if why is not None:
        return RankEnded(f"{ended.first.name}: {why}", code if code > 0 else EXIT_FAILED)
    when = "" if ended.started else " before the worker had started"
    return RankEnded(f"{ended.why}{when}", EXIT_FAILED)
