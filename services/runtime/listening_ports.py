"""Is the port free? Found out before anything slow happens."""

import errno
import socket
from typing import Final

from baton.runtime.errors import StartupError

BACKLOG: Final = 2048


def bind_port(host: str, port: int, flag: str) -> socket.socket:
    """A listening TCP socket on `host:port`; port 0 takes any free one (`port_of` tells which).

    It listens at once, so that a second process fails here rather than later. `flag` is the setting
    that chose the port, for the message. Raises StartupError.
    """
    sock = reserve_port(host, port, flag)
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise cannot_listen(host, port, flag, error) from None
    sock.setblocking(False)
    return sock


def reserve_port(host: str, port: int = 0, flag: str = "", host_flag: str = "--host") -> socket.socket:
    """Hold a port (0: a free one) without listening on it: another process that is told of it can listen
    there, and the system gives it to nobody who is not. For as long as the socket is open.

    `flag` and `host_flag` are the settings that chose them. Raises StartupError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise StartupError(f"{host_flag} {host} cannot be resolved: {error}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise cannot_listen(host, port, flag, error, host_flag) from None
    return sock


def port_of(sock: socket.socket) -> int:
    """The port a bound socket has."""
    port: int = sock.getsockname()[1]
    return port


def cannot_listen(
    host: str, port: int, flag: str, error: OSError | None = None, host_flag: str = "--host"
) -> StartupError:
    """Why nothing can listen there, in words that name the flag to change."""
    if error is None or error.errno == errno.EADDRINUSE:
        return StartupError(
            f"port {port} on {host} is in use: end what uses it or choose another with {flag}"
        )
    if error.errno == errno.EACCES:
        return StartupError(f"port {port} needs privileges: choose one above 1023 with {flag}")
    if error.errno == errno.EADDRNOTAVAIL:
        return StartupError(f"{host} is not an address of this machine: choose another with {host_flag}")
    return StartupError(f"cannot listen on {host} port {port} ({flag}): {error.strerror}")
