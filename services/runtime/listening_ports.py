"""Binding of TCP ports early in the start, so that a taken port is found before anything slow happens."""

import errno
import socket
from typing import Final

from baton.runtime.errors import StartupError

BACKLOG: Final = 2048


def bind_port(host: str, port: int, flag: str, *, is_shared: bool = False) -> socket.socket:
    """Return a listening TCP socket on `host:port`. Port 0 takes any free one, which `port_of` returns.

    It listens at once, so that a second process fails here rather than later. `flag`: name of the port's
    setting, for the error. `is_shared`: let other processes of this user, which say so too, listen there as
    well (SO_REUSEPORT). Raises StartupError.
    """
    sock = reserve_port(host, port, flag, is_shared=is_shared)
    try:
        start_listening(sock)
    except OSError as error:
        sock.close()
        raise cannot_listen(host, port, flag, error) from None
    return sock


def start_listening(sock: socket.socket) -> None:
    """Let a socket of `reserve_port` take connections. Raises OSError."""
    sock.listen(BACKLOG)
    sock.setblocking(False)


def reserve_port(
    host: str, port: int = 0, flag: str = "", host_flag: str = "--host", *, is_shared: bool = False
) -> socket.socket:
    """Return a bound socket that does not listen. Port 0 takes any free one.

    As long as it is open, the system gives the port to no other program. A process that is told the port can
    still listen there. `flag`, `host_flag`: names of the settings of port and host, for the error.
    `is_shared`: as for `bind_port`. Raises StartupError.
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
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise cannot_listen(host, port, flag, error, host_flag) from None
    return sock


def port_of(sock: socket.socket) -> int:
    """Return the port number of a bound socket."""
    port: int = sock.getsockname()[1]
    return port


def cannot_listen(
    host: str, port: int, flag: str, error: OSError | None = None, host_flag: str = "--host"
) -> StartupError:
    """Return the StartupError for a port that cannot be bound. Its text names the flag to change."""
    if error is None or error.errno == errno.EADDRINUSE:
        return StartupError(
            f"port {port} on {host} is in use: end what uses it or choose another with {flag}"
        )
    if error.errno == errno.EACCES:
        return StartupError(f"port {port} needs privileges: choose one above 1023 with {flag}")
    if error.errno == errno.EADDRNOTAVAIL:
        return StartupError(f"{host} is not an address of this machine: choose another with {host_flag}")
    return StartupError(f"cannot listen on {host} port {port} ({flag}): {error.strerror}")
