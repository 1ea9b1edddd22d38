"""TCP control connection between two ranks, which carries short lines of text beside the collectives."""

import asyncio
from collections.abc import Callable
from typing import Final, cast

HELLO_S: Final = 5.0
"""Seconds within which the other end of a new connection has to send its rank."""
LINE_BYTES_MAX: Final = 4096


class ControlLine(asyncio.Protocol):
    """One control connection between two ranks, which sends and receives lines of text."""

    def __init__(
        self, received: "Callable[[ControlLine, str, str], None]", gone: "Callable[[ControlLine], None]"
    ) -> None:
        self._received = received
        self._gone = gone
        self._bytes = bytearray()
        self._transport: asyncio.Transport | None = None
        self.rank: int | None = None
        """Rank at the other end, once it has sent its number. None before that."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Some event loops have connections of other classes.
        self._transport = cast("asyncio.Transport", transport)
        if self.rank is None:
            asyncio.get_running_loop().call_later(HELLO_S, self._hang_up_on_silence)

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        *lines, rest = self._bytes.split(b"\n")
        self._bytes = rest
        if max(map(len, (*lines, rest))) > LINE_BYTES_MAX:
            self.close()
            return
        for line in lines:
            word, _, text = line.decode(errors="replace").partition(" ")
            self._received(self, word, text)

    def connection_lost(self, _: Exception | None) -> None:
        self._gone(self)

    def send(self, word: str, text: object = "") -> None:
        if self._transport is not None and not self._transport.is_closing():
            line = " ".join(f"{word} {text}".split()).encode()
            self._transport.write(line[:LINE_BYTES_MAX] + b"\n")

    def close(self) -> None:
        """Close the control connection after sending buffered lines."""
        if self._transport is not None:
            self._transport.close()

    def _hang_up_on_silence(self) -> None:
        if self.rank is None:
            self.close()
