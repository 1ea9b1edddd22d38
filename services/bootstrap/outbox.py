"""Bounded queue of a room's messages for its only reader."""

import asyncio
from collections import deque
from typing import Final, Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Bounded queue of messages with one reader at a time, filled from the same event loop. If the reader's
    wait is cancelled, no message is lost.

    `asyncio.Queue` serves many readers, but costs several times as much for each token.
    """

    __slots__ = ("_most", "_reader", "_waiting")

    def __init__(self, most: int) -> None:
        self._most: Final = most
        self._waiting: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, each: T) -> None:
        """Add a message. Raises asyncio.QueueFull if the queue is full."""
        if len(self._waiting) >= self._most:
            raise asyncio.QueueFull
        self._waiting.append(each)
        reader = self._reader
        if reader is not None:
            self._reader = None
            if not reader.done():  # its wait was not cancelled
                reader.set_result(None)

    async def get(self) -> T:
        while not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._waiting.popleft()
