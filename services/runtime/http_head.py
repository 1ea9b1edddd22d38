"""How much may a client send that is no body, before and after it has asked?

The parser below takes a request line, headers and trailers of any length, from anybody, key or not.
"""

from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX: Final = 64 * 1024


class BoundedHttp(HttpToolsProtocol):
    """Hangs up on a head, or on trailers, that do not end."""

    _got_on = False
    _bytes = 0
    """Since the request last got on: its head was whole, some of its body came, or it ended."""

    def data_received(self, data: bytes) -> None:
        self._got_on = False
        super().data_received(data)
        self._bytes = 0 if self._got_on else self._bytes + len(data)
        if self._bytes > HEAD_BYTES_MAX:
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._got_on = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._got_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._got_on = True
        super().on_message_complete()
