"""Is the client still there?"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection, or stopped reading from it. There is nobody to answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, or cancel it as soon as the client hangs up.

    The request's body must have been read. When this returns or raises, `work` has ended, its clean-up
    included. Raises ClientGone, or what `work` raises.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
