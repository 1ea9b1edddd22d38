"""The client of an HTTP connection, and a callback for when it goes away.

uvicorn reports that only to the last request of a connection, and only to a task that waits for it. The last
request may wait behind the one that is being answered.
"""

from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.flow_control import FlowControl

IN_STATE: Final = "client"
"""Key in the state of a request's scope."""


class ClientConnection:
    """Client of one connection."""

    __slots__ = ("_flow", "_on_gone", "gone", "is_sending")

    def __init__(self, flow: FlowControl, is_sending: Callable[[], bool] = lambda: False) -> None:
        """`is_sending`: returns whether the body of the last request is incomplete."""
        self._flow = flow
        self.is_sending = is_sending
        self._on_gone: Callable[[], None] | None = None
        self.gone = False

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when the client goes away.

        It is for the request that is being answered, after its body was read. It resumes reading, without
        which the connection's end is not noticed.
        """
        self._on_gone = on_gone
        self._flow.resume_reading()

    def watch_no_more(self) -> None:
        self._on_gone = None

    def lost(self) -> None:
        """Note the end of the connection."""
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()


def client_connection_of(scope: Any) -> ClientConnection | None:
    """Return the client that sent a request, or None if the server is another one."""
    found = scope.get("state", {}).get(IN_STATE)
    return found if isinstance(found, ClientConnection) else None
