"""Is the client of a connection still there? The request that is being answered is told once it is not.

The server below says so to the request that came last, which may wait behind the one that is being answered,
and only to who waits for it, in a task.
"""

from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.flow_control import FlowControl

IN_STATE: Final = "client"
"""Under which name it is in the state of a request's scope."""


class ClientConnection:
    """Of one connection's client."""

    __slots__ = ("_flow", "_on_gone", "gone", "is_sending")

    def __init__(self, flow: FlowControl, is_sending: Callable[[], bool] = lambda: False) -> None:
        """`is_sending`: whether the body of the last request is not whole."""
        self._flow = flow
        self.is_sending = is_sending
        self._on_gone: Callable[[], None] | None = None
        self.gone = False

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Have `on_gone` called when the client goes. For the request that is being answered, whose body has
        been read: reading goes on, without which the connection's end is not seen."""
        self._on_gone = on_gone
        self._flow.resume_reading()

    def watch_no_more(self) -> None:
        self._on_gone = None

    def lost(self) -> None:
        """The connection has ended."""
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()


def client_connection_of(scope: Any) -> ClientConnection | None:
    """Of the client that sent this request. None: the server is not ours."""
    found = scope.get("state", {}).get(IN_STATE)
    return found if isinstance(found, ClientConnection) else None
