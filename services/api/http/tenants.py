"""In whose share is a request served, while it waits?

In that of its API key, or, where none is asked for, of the address that it comes from. Behind a gateway all
come with one key, or from one address: there a header, which the gateway sets, tells its tenants apart. A
digest stands for what it says, so that it is told to no log.
"""

from hashlib import blake2b
from typing import Final

from starlette.types import Scope

from baton.api.http.authentication import caller_in
from baton.api.http.request_headers import header

TENANT_BYTES: Final = 16


def tenant_of(scope: Scope, named_by: str = "") -> bytes:
    """`named_by`: the header, in lower case; empty: none. A request without it is its caller's own."""
    caller = caller_in(scope)
    named = header(scope, named_by.encode()) if named_by else None
    if not named:
        return caller
    return blake2b(named.encode(), digest_size=TENANT_BYTES, key=caller[:64], person=b"tenant").digest()
