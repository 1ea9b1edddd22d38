"""Salts of prompts: only requests with the same salt share cached KV.

A salt is a number computed from the field `cache_salt` and, if there are several API keys, from the key. It
is a digest, so that no worker and no log sees either. The key enters as a digest under a secret of this
process, so that keys cannot be guessed from salts. A `cache_salt` further divides the prompts of one key. No
`cache_salt` results in the salt of another key.
"""

from hashlib import blake2b

from baton.ids import SALT_BYTES
from baton.web.api_keys import Caller


def salt_of(cache_salt: str | None, caller: Caller = b"") -> int:
    """Return the salt of a request; 0 if it has none. `caller`: digest of the API key, if its prompts share
    no prefix cache with other keys."""
    if not cache_salt and not caller:
        return 0
    said = (cache_salt or "").encode()
    return int.from_bytes(
        blake2b(said, digest_size=SALT_BYTES, key=caller, person=b"cache_salt").digest(), "big"
    )
