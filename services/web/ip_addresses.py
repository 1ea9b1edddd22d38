"""Which address does a text name, and which network is one caller's?"""

import socket
from typing import Final

FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
IPV4_BYTES: Final = 4
NETWORK_BITS: Final = 64
"""Of an IPv6 address: what one household or host has all of."""
MAPPED: Final = bytes(10) + b"\xff\xff"
"""What an IPv6 address begins with that stands for an IPv4 one."""


def packed(text: str) -> bytes | None:
    """Its 4 or 16 bytes; None for what is no address. It is asked twice of every request: the C library takes
    a tenth of the time of `ipaddress`, of IPv6 a seventh, and the same texts for an address."""
    for family in FAMILIES:
        try:
            return socket.inet_pton(family, text)
        except (OSError, ValueError):
            continue
    return None


def network_of(host: str) -> bytes:
    """Stands for everybody behind one address: an IPv4 address, an IPv6 /64, or a text that is no address."""
    address = packed(host.partition("%")[0])
    if address is None:
        return host.encode("utf-8", "surrogatepass")
    if len(address) == IPV4_BYTES or address.startswith(MAPPED):
        return address
    return address[: NETWORK_BITS // 8]
