"""Gloo connections of a process to the other ranks of its worker, and the reasons why they fail.

The agreement on turns and the engine's collectives are process groups of their own. Both pass in
torch.distributed, since this package is also loaded where the tensor library is not.
"""

import os
import re
import socket
from datetime import timedelta
from typing import Any, Final

SOURCE_LOCATION: Final = re.compile(r"^\[[^\]]*\] ")
ADVICE: Final = " This is typically caused by"


def connect_gloo(
    c10d: Any, store: Any, rank: int, size: int, timeout: timedelta, host: str, port: int
) -> Any:
    """Return a gloo process group of `c10d`, which is torch.distributed, over `store`. Block for at most
    `timeout`.

    A rank listens at the address from which it reaches rank 0, `host:port`. GLOO_SOCKET_IFNAME, torch's own
    variable, names another network. Raises RuntimeError, OSError.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return c10d.ProcessGroupGloo(store, rank, size, timeout)
    options = c10d.ProcessGroupGloo._Options()
    set_timeout(options, timeout)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_address_toward(host, port))]
    return c10d.ProcessGroupGloo(store, rank, size, options)


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the time-out in a process group's `options`, of gloo or NCCL. torch has only a private
    name for it."""
    options._timeout = timeout


def first_line(error: Exception) -> str:
    """Return an error's first line, without its place in torch's sources and torch's advice."""
    return SOURCE_LOCATION.sub("", str(error).partition("\n")[0]).partition(ADVICE)[0]


def _address_toward(host: str, port: int) -> str:
    """Return this machine's address on the way to `host`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
