"""Acceptor of HTTP connections, which closes those that cannot be served.

If the process can open no more files, a new connection is accepted on a spare file descriptor and closed.
Otherwise it might wait without end in the queue of the listening socket. On a TLS port, connections without
TLS are closed, too. Both are counted, and logged at a limited rate.
"""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from baton.runtime.log_throttle import LogThrottle
from baton.runtime.logging import Log
from baton.web.closed_connections import NO_TLS, OPEN_FILES, ClosedConnections
from baton.web.connection_limits import ConnectionEntry, ConnectionLimits

log = Log(__name__)

AT_ONCE: Final = 64
"""Most connections that are accepted in a row. After them, other events of the event loop are
handled first."""
HANDSHAKE_S: Final = 20.0
PAUSE_S: Final = 0.1
"""Pause before accepting again, if not even one connection could be accepted and closed, seconds."""
NO_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Acceptor of connections on one listening socket, which it owns."""

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[ConnectionEntry], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        connections: ClosedConnections,
        limits: ConnectionLimits,
    ) -> None:
        self._sock = sock
        self._protocol = protocol
        self._tls = tls
        self._connections = connections
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._spare: int | None = None
        self._out_of_files, self._without_tls = LogThrottle(), LogThrottle()

    def start(self) -> None:
        self._sock.setblocking(False)
        self._keep_spare()
        self._loop.add_reader(self._sock.fileno(), self._take)

    def close(self) -> None:
        """Stop accepting connections. Open connections go on. Idempotent."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        if self._resuming is not None:
            self._resuming.cancel()
        for task in self._beginning:
            task.cancel()
        self._give_up_spare()

    def _take(self) -> None:
        for _ in range(AT_ONCE):
            try:
                taken, address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # the client has gone
            except OSError as error:
                if error.errno not in NO_FILES:
                    raise
                self._hang_up(error)
                return
            entry = self._limits.admit(address)
            if entry is None:
                taken.close()
                continue
            task = self._loop.create_task(self._begin(taken, address, entry))
            entry.close = task.cancel
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, taken: socket.socket, address: Any, entry: ConnectionEntry) -> None:
        taken.setblocking(False)
        patience_s = None if self._tls is None else HANDSHAKE_S
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(entry), taken, ssl=self._tls, ssl_handshake_timeout=patience_s
            )
        except (OSError, TimeoutError) as error:
            taken.close()
            entry.leave()
            if self._tls is None:
                return  # the client has gone
            self._connections.count(NO_TLS)
            if times := self._without_tls.count():
                cause = " ".join(str(error).split()) or type(error).__name__
                log.warning("a client does not speak TLS", client=_shown(address), cause=cause, times=times)
        except asyncio.CancelledError:
            taken.close()
            entry.leave()
            raise

    def _hang_up(self, error: OSError) -> None:
        """Close all waiting connections, each accepted on the spare file descriptor: no other one is free."""
        self._give_up_spare()
        times, address = 0, None
        with suppress(OSError):
            while times < AT_ONCE:
                taken, address = self._sock.accept()
                taken.close()
                times += 1
        self._keep_spare()
        if times:
            self._connections.count(OPEN_FILES, times)
        else:
            self._loop.remove_reader(self._sock.fileno())
            self._resuming = self._loop.call_later(
                PAUSE_S, self._loop.add_reader, self._sock.fileno(), self._take
            )
        if times_logged := self._out_of_files.count(times):
            log.warning(
                "new connections are closed: no more files can be opened",
                client=_shown(address),
                cause=error.strerror,
                times=times_logged,
            )

    def _keep_spare(self) -> None:
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_up_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


def _shown(address: Any) -> str | None:
    return str(address[0]) if isinstance(address, tuple) and address else None
