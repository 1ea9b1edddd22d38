"""Is the client still there?"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from baton.web.client_connection import client_connection_of

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection, or stopped reading and was hung up on. There is nobody to answer."""


async def unless_gone(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, or cancel it as soon as the client hangs up.

    The request's body must have been read. When this returns or raises, `work` has ended, its clean-up
    included. Raises ClientGone, or what `work` raises.
    """
    working = asyncio.current_task()
    if working is None:
        raise RuntimeError("requests are answered by tasks")
    gone = False

    def hung_up(_: object = None) -> None:
        nonlocal gone
        gone = True
        working.cancel()

    presence = client_connection_of(scope)
    watching: asyncio.Task[None] | None = None
    if presence is None:
        watching = asyncio.create_task(_gone(receive))
        watching.add_done_callback(hung_up)
    elif presence.gone:
        work.close()
        raise ClientGone
    else:
        presence.watch(hung_up)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and not working.uncancel():
            raise ClientGone from None
        raise
    finally:
        if presence is not None:
            presence.watch_no_more()
        if watching is not None:
            watching.remove_done_callback(hung_up)
            watching.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
