"""Gloo process group that connects a process to the other ranks of its worker, and texts of its errors.

The ranks' agreement on turns and the engine's collectives use separate groups, both made here. Callers pass
in torch.distributed, because this package is also loaded by processes without torch.
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
    """Return a gloo process group that connects this rank to the others, which meet at `store`.

    `c10d`: the module torch.distributed. It blocks for at most `timeout`. A rank listens at the address from
    which it reaches rank 0, `host:port`. GLOO_SOCKET_IFNAME, torch's own variable, names another network.
    Raises RuntimeError, OSError.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return c10d.ProcessGroupGloo(store, rank, size, timeout)
    options = c10d.ProcessGroupGloo._Options()
    set_timeout(options, timeout)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address_toward(host, port))]
    return c10d.ProcessGroupGloo(store, rank, size, options)


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the time-out in the `options` of a gloo or NCCL process group. torch has only a private name for
    it."""
    options._timeout = timeout


def first_line(error: Exception) -> str:
    """Return the first line of a torch error, without the location in torch's sources and torch's advice."""
    return SOURCE_LOCATION.sub("", str(error).partition("\n")[0]).partition(ADVICE)[0]


def address_toward(host: str, port: int) -> str:
    """Return the address that this machine uses for connections to `host`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
