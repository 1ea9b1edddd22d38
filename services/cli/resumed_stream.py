"""Stream of server-sent events that is continued after its connection broke.

Each event of an answer has an id. If the connection breaks, the same request is sent again with the last id
in the header `Last-Event-ID`, and the server goes on behind that event.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import httpx

DONE: Final = "[DONE]"
TRIES_MAX: Final = 5
"""Most tries in a row to continue a stream, without an event in between."""
WAIT_S: Final = 0.5
"""Seconds before the first try to continue a stream. Each later try waits twice as long."""
RESTARTING: Final = frozenset({502, 503, 504})
"""HTTP statuses of a server, or of a proxy before it, that is not up again yet."""

Check = Callable[[httpx.Response], httpx.Response]


class StreamCut(httpx.TransportError):
    """Error: the connection ended before the stream was complete."""


def stream_data(
    http: httpx.Client, path: str, body: bytes, check: Check, report: Callable[[str], None]
) -> Iterator[str]:
    """Yield the data of each event of the stream that answers a request, without the `[DONE]` at its end.

    `body`: JSON text of the request. `check`: raises an error for a response that is no stream. `report`:
    writes a line for the user when the stream is continued. Raises httpx.TransportError if that fails.
    """
    last_id, tries = "", 0
    while True:
        try:
            for id_, data in _events(http, path, body, last_id, check):
                last_id, tries = id_ or last_id, 0
                if data == DONE:
                    return
                yield data
            raise StreamCut("the server ended the answer before it was complete")
        except httpx.TimeoutException:
            raise
        except httpx.TransportError:
            tries += 1
            if not last_id or tries > TRIES_MAX:
                raise
        report(f"the connection broke: the answer is continued (try {tries} of {TRIES_MAX})")
        time.sleep(WAIT_S * 2 ** (tries - 1))


def _events(
    http: httpx.Client, path: str, body: bytes, last_id: str, check: Check
) -> Iterator[tuple[str, str]]:
    """Send a request, and yield the id and the data of each event of its answer. `last_id`: id of the event
    behind which the answer goes on; empty for the whole answer."""
    headers: Mapping[str, str] = {"Content-Type": "application/json"}
    if last_id:
        headers = {**headers, "Last-Event-ID": last_id}
    with http.stream("POST", path, content=body, headers=headers) as reply:
        if reply.is_error:
            reply.read()
            if last_id and reply.status_code in RESTARTING:
                raise StreamCut(f"the server answered {reply.status_code}")
        check(reply)
        id_, data = "", ""
        for line in reply.iter_lines():
            name, _, value = line.partition(":")
            if name == "id":
                id_ = value.strip()
            elif name == "data":
                data = value.strip()
            elif not line and data:
                yield id_, data
                id_, data = "", ""
