"""Who can reach an address: this machine alone, or others?"""

import ipaddress


def is_reachable_from_elsewhere(host: str) -> bool:
    """Whether what listens on `host` can be reached from elsewhere. A name other than localhost may be."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return True


def local_address_of(host: str) -> str:
    """Where a process of this machine reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
