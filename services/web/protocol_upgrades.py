"""HTTP protocol that declines upgrades: a request is answered as if it offered none (RFC 9110, 7.8).

Java's HTTP client offers HTTP/2 with each request without TLS. The parser ends such a request with its head,
and would take a POST's body for the next request.
"""

from typing import Any, Final

import httptools

from baton.web.refusable_http import RefusableHttp

OFFER: Final = b"upgrade"


class PlainHttp(RefusableHttp):
    """HTTP/1.1 protocol that declines upgrades. uvicorn has to be configured with `ws="none"` for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)

    @property
    def _offers(self) -> bool:
        """Whether the request offers an upgrade to another protocol, such as HTTP/2.

        CONNECT counts as no offer, because it has no body and is refused.
        """
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_headers_complete(self) -> None:
        if not self._offers:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offers:
            super().on_message_complete()

    def head_without_offer(self) -> bytes | None:
        """Return the head of the last request without its offer of an upgrade, or None if it has no offer.

        No part of the head can contain a line break, because the parser has recognised each part.
        """
        if not self._offers:
            return None
        version = self.parser.get_http_version().encode()
        first = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
        fields = [b"%s: %s\r\n" % field for field in self.headers if field[0] != OFFER]
        return b"".join((first, *fields, b"\r\n"))


class _Parser(httptools.HttpRequestParser):
    def __init__(self, protocol: PlainHttp) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        while True:
            try:
                super().feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                head = self._protocol.head_without_offer()
                if head is None:
                    raise
                super().feed_data(head)
                data = data[offer.args[0] :]
            else:
                return
