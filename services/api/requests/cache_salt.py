"""With whose prompts does a request share what is computed of them?

With those of its own salt: a number that stands for `cache_salt` and, where there are several keys, for the
key. It is a digest, so that neither is told to a worker or a log. That of a key is under this process's
secret, so that nobody can try keys against it. A `cache_salt` divides a key's prompts further: no text of it
makes the salt of another key.
"""

from hashlib import blake2b

from baton.rooms.request import SALT_BYTES
from baton.web.api_keys import Caller


def salt_of(cache_salt: str | None, caller: Caller = b"") -> int:
    """0 where nothing is said. `caller`: whose prompts share nothing with anybody else's."""
    if not cache_salt and not caller:
        return 0
    said = (cache_salt or "").encode()
    return int.from_bytes(
        blake2b(said, digest_size=SALT_BYTES, key=caller, person=b"cache_salt").digest(), "big"
    )
