"""How does a process make gloo connections to the other ranks of its worker, and tell why it could not?

For the agreement and for the engine's team alike, which are groups of their own and hand in
torch.distributed: this package is loaded where the tensor library is not.
"""

import os
import re
import socket
from datetime import timedelta
from typing import Any, Final

SOURCE_PLACE: Final = re.compile(r"^\[[^\]]*\] ")
ADVICE: Final = " This is typically caused by"


def connect_gloo(
    c10d: Any, store: Any, rank: int, size: int, timeout: timedelta, host: str, port: int
) -> Any:
    """A gloo process group of `c10d`, which is torch.distributed, over `store`. Blocks, at most `timeout`.

    A rank listens at the address from which it reaches rank 0, `host:port` (GLOO_SOCKET_IFNAME, torch's own
    variable, names another network). Raises RuntimeError, OSError.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return c10d.ProcessGroupGloo(store, rank, size, timeout)
    options = c10d.ProcessGroupGloo._Options()
    set_timeout(options, timeout)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_address_toward(host, port))]
    return c10d.ProcessGroupGloo(store, rank, size, options)


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the time-out of a process group's `options`, of gloo's or NCCL's. torch has only a private name."""
    options._timeout = timeout


def first_line(error: Exception) -> str:
    """Without the place in torch's sources before it, and the advice and C++ stack after it."""
    return SOURCE_PLACE.sub("", str(error).partition("\n")[0]).partition(ADVICE)[0]


def _address_toward(host: str, port: int) -> str:
    """This machine's address on the way to `host`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
