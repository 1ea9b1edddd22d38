"""Tenants: the share in which a request waits.

The tenant is the API key, or without keys the address. Behind a gateway all requests come with one key or
from one address: a header that the gateway sets then distinguishes its tenants. A digest replaces the
header's value, so that no log has it.
"""

from hashlib import blake2b
from typing import Final

TENANT_BYTES: Final = 16


def tenant_of(caller: bytes, value: str) -> bytes:
    """Return the tenant that a caller's request names. `value`: the tenant header's."""
    return blake2b(value.encode(), digest_size=TENANT_BYTES, key=caller[:64], person=b"tenant").digest()
