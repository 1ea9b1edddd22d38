"""Salts of prompts: only requests with the same salt share cached KV.

A salt is a number for `cache_salt` and, with several API keys, for the key. It is a digest, so that no
worker and no log sees either. The digest of a key is under a secret of this process, so that nobody can try
keys against it. A `cache_salt` divides one key's prompts further: no text of it gives the salt of another
key.
"""

from hashlib import blake2b

from baton.rooms.request import SALT_BYTES
from baton.web.api_keys import Caller


def salt_of(cache_salt: str | None, caller: Caller = b"") -> int:
    """Return the salt of a request; 0 if it has none. `caller`: the key whose prompts share nothing with
    others."""
    if not cache_salt and not caller:
        return 0
    said = (cache_salt or "").encode()
    return int.from_bytes(
        blake2b(said, digest_size=SALT_BYTES, key=caller, person=b"cache_salt").digest(), "big"
    )
