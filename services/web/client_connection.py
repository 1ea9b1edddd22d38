"""Client of an HTTP connection, with a callback for its disconnect.

uvicorn reports a disconnect only to the last request of a connection, and only to a task that waits for it.
That request may be waiting behind the one that is being answered.
"""

from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.flow_control import FlowControl

IN_STATE: Final = "client"
"""Key under which the state of a request's ASGI scope holds the ClientConnection."""


class ClientConnection:
    """Client of one HTTP connection, whose disconnect a request can watch for."""

    __slots__ = ("_flow", "_on_gone", "gone", "is_sending")

    def __init__(self, flow: FlowControl, is_sending: Callable[[], bool] = lambda: False) -> None:
        """Create the client of an open connection.

        `is_sending`: function that returns whether the body of the last request is incomplete.
        """
        self._flow = flow
        self.is_sending = is_sending
        self._on_gone: Callable[[], None] | None = None
        self.gone = False

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when the client disconnects, while a request of the connection is being answered.

        The request's body must have been read before. Reading from the socket is resumed, because otherwise
        the end of the connection is not noticed.
        """
        self._on_gone = on_gone
        self._flow.resume_reading()

    def watch_no_more(self) -> None:
        self._on_gone = None

    def lost(self) -> None:
        """Record that the connection of this client has ended, and call the callback given to `watch`."""
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()


def client_connection_of(scope: Any) -> ClientConnection | None:
    """Return the client that sent a request, or None if the server is not Baton's own."""
    found = scope.get("state", {}).get(IN_STATE)
    return found if isinstance(found, ClientConnection) else None
