"""Cancellation of the work on a request as soon as its client disconnects."""

import asyncio
from types import TracebackType

from starlette.types import Receive, Scope

from baton.web.client_connection import client_connection_of


class ClientGone(Exception):
    """Error: the client closed the connection, or stopped reading and was disconnected. No response can be
    sent."""


class UntilDisconnect:
    """Context manager that cancels its block when the client disconnects, and then raises ClientGone.

    The request's body must have been read before. When the block is left, its work has ended, including its
    clean-up.
    """

    __slots__ = ("_connection", "_gone", "_receive", "_task", "_watch")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._connection = client_connection_of(scope)
        self._receive = receive
        self._gone = False
        self._task: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        """Start watching the client. Raises ClientGone, and does not enter the block, if it has already
        disconnected."""
        self._task = asyncio.current_task()
        if self._task is None:
            raise RuntimeError("requests are answered by tasks")
        if self._connection is None:
            self._watch = asyncio.create_task(_disconnected(self._receive))
            self._watch.add_done_callback(self._cancel)
        elif self._connection.gone:
            raise ClientGone
        else:
            self._connection.watch(self._cancel)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connection.watch_no_more()
        if self._watch is not None:
            self._watch.remove_done_callback(self._cancel)
            self._watch.cancel()
        ended = isinstance(error, asyncio.CancelledError) and self._gone and self._task is not None
        if ended and self._task is not None and not self._task.uncancel():
            raise ClientGone from None

    def _cancel(self, _: object = None) -> None:
        self._gone = True
        assert self._task is not None
        self._task.cancel()


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected. Needed on HTTP servers that do not report a disconnect through
    `ClientConnection`."""
    while (await receive())["type"] != "http.disconnect":
        pass
