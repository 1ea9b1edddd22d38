"""Sends and receives of tensors between ranks over gloo, without blocking the event loop.

Starting a send or a receive takes no time. Waiting for its end blocks, so one thread waits and wakes the
loop. It is a daemon thread, so that a rank that hangs delays no exit.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

import torch

from baton.parallel.rendezvous import ProcessGroup, post
from baton.runtime.gloo_connections import first_line

WAIT_UNIT_S: Final = 0.001
"""Resolution of gloo's time-outs, in seconds. Gloo cuts off fractions of it."""

Ended = asyncio.Future[str | None]
"""Type of a future that is done once all sends and receives have ended. Its result is an error text, or None
if they succeeded."""
Works = list[tuple[Any, torch.Tensor]]
"""Type of a list of pairs: gloo's handle of a send or receive, and the tensor that it reads or writes."""


class GlooExchange:
    """Gloo connections of this rank to the others. Made from a `rendezvous`, used by one event loop."""

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        self._group: ProcessGroup | None = group
        self._timeout_s = timeout_s
        self._works: Works = []
        self._problem: str | None = None
        self._ended: Ended | None = None
        self._waits: SimpleQueue[tuple[asyncio.AbstractEventLoop, Ended, Works] | None] = SimpleQueue()
        threading.Thread(target=self._wait, name="agreement", daemon=True).start()

    @property
    def under_way(self) -> bool:
        return bool(self._works) or self._problem is not None

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Start to send a tensor. It must not change before `end`, which returns any error."""
        self._start(tensor, lambda group: group.send([tensor], to, tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Start to receive a tensor. It is complete after `end`, which returns any error."""
        self._start(tensor, lambda group: group.recv([tensor], source, tag))

    def _start(self, tensor: torch.Tensor, start: Callable[[ProcessGroup], Any]) -> None:
        assert self._group is not None
        try:
            self._works.append((start(self._group), tensor))
        except RuntimeError as error:  # gloo knows that the connection is closed
            self._problem = first_line(error)

    async def end(self, within_s: float | None = None) -> str | None:
        """Wait until all sends and receives under way have ended. Return the error, or None.

        It waits at most `within_s` seconds, if given, and at most the group's time-out.
        """
        if self._problem is not None:
            return self._problem
        loop = asyncio.get_running_loop()
        self._ended = ended = loop.create_future()
        works, self._works = self._works, []
        self._waits.put((loop, ended, works))
        if within_s is not None:
            self.give_up(within_s, f"not ended in {within_s:g} s")
        try:
            problem: str | None = await ended
        finally:
            self._ended = None
        return problem

    def give_up(self, after_s: float, why: str) -> None:
        """Let the sends and receives under way go on for `after_s` seconds. After that they count
        as failed."""
        if self._ended is not None:
            asyncio.get_running_loop().call_later(after_s, _settle, self._ended, why)

    def close(self) -> None:
        """Close the gloo connections as soon as gloo's threads release them. Idempotent."""
        if self._group is not None:
            self._waits.put(None)
            threading.Thread(target=_let_go, args=([self._group, *self._works],), daemon=True).start()
            self._group, self._works = None, []

    def _wait(self) -> None:
        while (wait := self._waits.get()) is not None:
            loop, ended, works = wait
            post(loop, _settle, ended, _problem(works, time.monotonic() + self._timeout_s))
            del wait, works


def _problem(works: Works, until: float) -> str | None:
    try:
        for work, _ in works:
            work.wait(whole_wait(until - time.monotonic()))
    except RuntimeError as error:
        return first_line(error)
    return None


def whole_wait(left_s: float) -> timedelta:
    """Return the smallest time that gloo can wait and that is at least `left_s` seconds.

    So the time-out is over by the caller's clock, too.
    """
    units = max(math.ceil(left_s / WAIT_UNIT_S), 1)
    return timedelta(seconds=units * WAIT_UNIT_S)


def _settle(ended: Ended, problem: str | None) -> None:
    if not ended.done():
        ended.set_result(problem)


def _let_go(works: list[Any]) -> None:
    works.clear()
