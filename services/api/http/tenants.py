"""Tenants, among which waiting requests are served in equal shares.

The tenant of a request is its API key, or without keys its address. Behind a gateway, all requests come with
one key or from one address. A header that the gateway sets then distinguishes its tenants. The header's value
is replaced by a digest, so that it appears in no log.
"""

from hashlib import blake2b
from typing import Final

TENANT_BYTES: Final = 16


def tenant_of(caller: bytes, value: str) -> bytes:
    """Return the tenant of a request: a digest of its caller and of the tenant header. `value`: the header's
    value."""
    return blake2b(value.encode(), digest_size=TENANT_BYTES, key=caller[:64], person=b"tenant").digest()
