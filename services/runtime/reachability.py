"""Whether the address of a port can be reached from this machine alone, or also from others."""

import ipaddress


def is_reachable_from_elsewhere(host: str) -> bool:
    """Return whether a port on `host` can be reached from other machines.

    A host name other than localhost counts as reachable.
    """
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return True


def local_address_of(host: str) -> str:
    """Return the address at which a process on this machine reaches a port that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
