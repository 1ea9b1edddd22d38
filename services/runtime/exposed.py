"""Who can reach an address: this machine alone, or others?"""

import ipaddress


def beyond_this_machine(host: str) -> bool:
    """Whether what listens on `host` can be reached from elsewhere. A name other than localhost may be."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return True
