"""Hosts from which an address can be reached: this machine alone, or others."""

import ipaddress


def is_reachable_from_elsewhere(host: str) -> bool:
    """Return whether a port on `host` can be reached from other machines. Names but localhost count as
    reachable.
    """
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return True


def local_address_of(host: str) -> str:
    """Return the address at which a process of this machine reaches a port on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
