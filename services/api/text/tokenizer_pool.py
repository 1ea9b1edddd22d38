"""Thread pool for work on long texts, with fair turns among callers.

Tokenising takes a second for each megabyte or two, and hundreds of bytes of memory for each byte. So only one
long text is processed at a time. Short texts always have a thread that no long text can occupy. Waiting
callers take turns, one text each, however much each of them has sent. So one caller delays another by one
text at most. Waiting texts are limited in bytes, per caller and in total, and in time (`bounded-admission`).
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from baton.api.backend import Overloaded
from baton.runtime.memory_trimming import trim_memory

THREADS: Final = 2
"""Number of threads. Tokenising releases the interpreter lock, so more threads would only take cores from the
event loop."""
LONG_BYTES: Final = 256 * 2**10
"""Size in bytes above which a text counts as long, so that only one of them is processed at a time. A shorter
text takes a fraction of a second."""
LONG_AT_ONCE: Final = 1
GIVE_BACK_BYTES: Final = 64 * 2**10
"""Size of a text in bytes above which freed memory is returned to the operating system after the work."""
WAITING_BYTES_MAX: Final = 64 * 2**20
CALLER_WAITING_BYTES_MAX: Final = WAITING_BYTES_MAX // 2
ONE_BYTES: Final = 4096
"""Least bytes that a waiting text counts as. So the limit on bytes also limits the number of waiting
texts."""
WAIT_S: Final = 60.0
RETRY_AFTER_S: Final = 1
RETRY_LONG_AFTER_S: Final = 10

T = TypeVar("T")


@dataclass(slots=True)
class _Waiter:
    size: int
    turn: asyncio.Future[None]


class _Lane:
    """Queue of texts of one kind (short or long) that wait for a thread, by caller. First comes the caller
    that had no turn for the longest time."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.running = 0
        self.of: OrderedDict[bytes, deque[_Waiter]] = OrderedDict()

    def next(self) -> _Waiter | None:
        """Remove and return the waiting text whose turn it is, or None. Its caller moves to the end of the
        queue."""
        while self.of:
            caller, waiters = next(iter(self.of.items()))
            waiter = waiters.popleft()
            if waiters:
                self.of.move_to_end(caller)
            else:
                del self.of[caller]
            if not waiter.turn.done():
                return waiter
        return None


class FairThreadPool:
    """Pool of two threads that process texts, with fair turns among callers. The threads end with the
    process. Used from one event loop."""

    def __init__(self, text: str = "long prompt", done: str = "tokenised") -> None:
        """Start the threads. Their error messages name the kind of text, `text`, and the kind of work, `done`
        (a participle such as "tokenised")."""
        self._text, self._done = text, done
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=done)
        self._short, self._long = _Lane(THREADS), _Lane(LONG_AT_ONCE)
        self._waiting: dict[bytes, int] = {}
        """Size in bytes of the waiting texts, by caller."""
        self.waiting_bytes = 0
        """Size in bytes of the waiting texts of all callers."""

    async def run(self, caller: bytes, size: int, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result. `size`: bytes of the text that it works on.

        Raises Overloaded if too much is waiting or the wait is too long, and whatever `work` raises. If the
        call is cancelled while it waits, it leaves the queue. If it is cancelled later, the thread finishes
        the work.
        """
        lane = self._long if size > LONG_BYTES else self._short
        if lane.of or not self._may_run(lane):
            await self._wait(lane, caller, max(size, ONE_BYTES))
        else:
            lane.running += 1
        running = asyncio.get_running_loop().run_in_executor(self._threads, _and_give_back(work, size))
        running.add_done_callback(lambda done: self._ended(lane, done))
        return await asyncio.shield(running)

    def _may_run(self, lane: _Lane) -> bool:
        return lane.running < lane.at_once and self._short.running + self._long.running < THREADS

    async def _wait(self, lane: _Lane, caller: bytes, size: int) -> None:
        retry_s = RETRY_LONG_AFTER_S if lane is self._long else RETRY_AFTER_S
        own = self._waiting.get(caller, 0) + size
        if own > CALLER_WAITING_BYTES_MAX or self.waiting_bytes + size > WAITING_BYTES_MAX:
            raise Overloaded(f"too many {self._text}s are waiting to be {self._done}", retry_s)
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        lane.of.setdefault(caller, deque()).append(waiter)
        self._waiting[caller], self.waiting_bytes = own, self.waiting_bytes + size
        try:
            async with asyncio.timeout(WAIT_S):
                await waiter.turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self._leave(lane)  # its turn came at the same time
            if isinstance(error, TimeoutError):
                late = f"a {self._text} was not {self._done} within {WAIT_S:g} s"
                raise Overloaded(late, retry_s) from None
            raise
        finally:
            self.waiting_bytes -= size
            self._waiting[caller] -= size
            if not self._waiting[caller]:
                del self._waiting[caller]

    def _ended(self, lane: _Lane, done: "asyncio.Future[Any]") -> None:
        if not done.cancelled():
            done.exception()  # marks it as read, since the caller may be gone
        self._leave(lane)

    def _leave(self, lane: _Lane) -> None:
        lane.running -= 1
        # Texts of the other kind (short, long) come first, so that neither kind keeps the other waiting.
        for each in (self._long, self._short) if lane is self._short else (self._short, self._long):
            while self._may_run(each) and (waiter := each.next()) is not None:
                each.running += 1
                waiter.turn.set_result(None)


def _and_give_back(work: Callable[[], T], size: int) -> Callable[[], T]:
    if size <= GIVE_BACK_BYTES:
        return work

    def both() -> T:
        try:
            return work()
        finally:
            trim_memory()

    return both
