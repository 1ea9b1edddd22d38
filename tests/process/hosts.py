"""Several hosts on one machine, with cables between them that can be cut.

Each host is a network namespace; a bridge joins them. Needs root and iproute2's `ip`. A cut takes the host's
cable out on the bridge's side: nothing passes either way, and neither end is told.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

NETWORK: Final = "10.77.0"
PREFIX: Final = "baton"


def missing() -> str | None:
    """Return why there can be no virtual hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None if shutil.which("ip") else "network namespaces need `ip` (apt install iproute2)"


@dataclass
class Hosts:
    """Hosts by name. The test itself has the address `address`."""

    address: str = f"{NETWORK}.1"
    _addresses: dict[str, str] = field(default_factory=dict)

    def add(self, name: str) -> str:
        """Add a virtual host, and return its address."""
        number = len(self._addresses) + 2
        space, cable = f"{PREFIX}-{name}", self._cable(name, number)
        self._addresses[name] = f"{NETWORK}.{number}"
        _ip("netns", "add", space)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", cable, "master", PREFIX, "up")
        _ip("-n", space, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", space, "link", "set", device, "up")
        return self._addresses[name]

    def on(self, name: str) -> Sequence[str]:
        """Return the prefix of a command line that runs on this host."""
        return ("ip", "netns", "exec", f"{PREFIX}-{name}")

    def cut(self, name: str) -> None:
        _ip("link", "set", self._cable(name), "down")

    def mend(self, name: str) -> None:
        _ip("link", "set", self._cable(name), "up")

    def _cable(self, name: str, number: int | None = None) -> str:
        return f"{PREFIX}-{number or self._addresses[name].rpartition('.')[2]}"

    def end(self) -> None:
        for name in self._addresses:
            _ip("netns", "del", f"{PREFIX}-{name}")


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Make virtual hosts, which are all removed at the end. At first there is only the test's own."""
    _ip("link", "add", PREFIX, "type", "bridge")
    made = Hosts()
    try:
        _ip("addr", "add", f"{made.address}/24", "dev", PREFIX)
        _ip("link", "set", PREFIX, "up")
        yield made
    finally:
        made.end()
        _ip("link", "del", PREFIX)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
