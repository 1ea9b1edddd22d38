"""Cancels the work on a request as soon as its client disconnects."""

import asyncio
from types import TracebackType

from starlette.types import Receive, Scope

from baton.web.client_connection import client_connection_of


class ClientGone(Exception):
    """The client closed the connection, or stopped reading and was disconnected. Nothing can be answered."""


class UntilDisconnect:
    """A block that is cancelled when the client disconnects, and then raises ClientGone.

    The request's body must have been read. The work in the block has ended, its clean-up included, when the
    block is left.
    """

    __slots__ = ("_connection", "_gone", "_receive", "_task", "_watch")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._connection = client_connection_of(scope)
        self._receive = receive
        self._gone = False
        self._task: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        """Raises ClientGone if the client has disconnected already: the block is not entered."""
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
    """Return when the client has disconnected, for servers that do not know it by themselves."""
    while (await receive())["type"] != "http.disconnect":
        pass
