"""Whose long text is worked on next, and how much at a time?

Tokenising takes a second for each megabyte or two, and hundreds of bytes for each byte. So of the longest
texts one is worked on at a time, and the others have a thread that no such text can hold. Who waits gets a
turn by caller, one each round, however much any of them sent: what one caller asks for delays another by one
text at most. What waits is bounded in bytes, of each caller and of all; and in time (`bounded-admission`).
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from baton.api.backend import Overloaded
from baton.runtime.memory_trimming import give_back

THREADS: Final = 2
"""Tokenising releases the interpreter lock; more threads would only take cores from the event loop."""
LONG_BYTES: Final = 256 * 2**10
"""A text above it is one of the longest; one below takes a fraction of a second."""
LONG_AT_ONCE: Final = 1
GIVE_BACK_BYTES: Final = 64 * 2**10
"""Behind a text above it the memory that it took is given back to the system."""
WAITING_BYTES_MAX: Final = 64 * 2**20
WAITING_BYTES_OF_ONE_MAX: Final = WAITING_BYTES_MAX // 2
ONE_BYTES: Final = 4096
"""As how much each text counts at least: so that what waits is bounded in number, too."""
WAIT_S: Final = 60.0
RETRY_AFTER_S: Final = 1
RETRY_LONG_AFTER_S: Final = 10

T = TypeVar("T")


@dataclass(slots=True)
class _Waiter:
    size: int
    turn: asyncio.Future[None]


class _Lane:
    """Texts of one kind that wait, by caller, those of whoever had no turn for longest first."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.running = 0
        self.of: OrderedDict[bytes, deque[_Waiter]] = OrderedDict()

    def next(self) -> _Waiter | None:
        """Whose turn it is; its caller is the last to have another."""
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
    """Two threads that end with the process. Used from one event loop."""

    def __init__(self, text: str = "long prompt", done: str = "tokenised") -> None:
        """What each works on, and what is done with it: in words, for who waits in vain."""
        self._text, self._done = text, done
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=done)
        self._short, self._long = _Lane(THREADS), _Lane(LONG_AT_ONCE)
        self._waiting: dict[bytes, int] = {}
        """Bytes of each caller's."""
        self._waiting_bytes = 0

    async def run(self, caller: bytes, size: int, work: Callable[[], T]) -> T:
        """What `work` returns, or raises, from a thread. `size`: bytes of text that it is about.

        Raises Overloaded. Cancelled while it waits, it gives its place up; while it runs, its thread goes on.
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
        if own > WAITING_BYTES_OF_ONE_MAX or self._waiting_bytes + size > WAITING_BYTES_MAX:
            raise Overloaded(f"too many {self._text}s are waiting to be {self._done}", retry_s)
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        lane.of.setdefault(caller, deque()).append(waiter)
        self._waiting[caller], self._waiting_bytes = own, self._waiting_bytes + size
        try:
            async with asyncio.timeout(WAIT_S):
                await waiter.turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self._leave(lane)  # its turn came as it went
            if isinstance(error, TimeoutError):
                late = f"a {self._text} was not {self._done} within {WAIT_S:g} s"
                raise Overloaded(late, retry_s) from None
            raise
        finally:
            self._waiting_bytes -= size
            self._waiting[caller] -= size
            if not self._waiting[caller]:
                del self._waiting[caller]

    def _ended(self, lane: _Lane, done: "asyncio.Future[Any]") -> None:
        if not done.cancelled():
            done.exception()  # whoever asked may be gone
        self._leave(lane)

    def _leave(self, lane: _Lane) -> None:
        lane.running -= 1
        # The kind that did not run just now first, so that neither is kept waiting by the other.
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
            give_back()

    return both
