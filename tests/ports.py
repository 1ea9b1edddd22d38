"""Free ports for the processes of tests, while many others are started."""

import socket
from contextlib import ExitStack
from typing import Final

from baton.runtime.listening_ports import port_of, reserve_port

HOST: Final = "127.0.0.1"

_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """Reserve a port for as long as the tests run, and return it. A port that is merely free may be taken by
    another process before its own process listens there."""
    _RESERVED.append(reserve_port(HOST))
    return port_of(_RESERVED[-1])


def free_neighbours(count: int) -> int:
    """Return the first of `count` neighbouring ports, each reserved as by `free_port`."""
    while True:
        first = free_port()
        others = range(first + 1, first + count)
        try:
            with ExitStack() as plain:
                for port in others:  # one that is reserved could be listened at all the same, but not so
                    plain.enter_context(socket.socket()).bind((HOST, port))
        except OSError:
            continue
        _RESERVED.extend(reserve_port(HOST, port) for port in others)
        return first
