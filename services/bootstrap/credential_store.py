"""Credentials of workers and keys of rooms, by which a caller proves that it acts for a worker or a room.

A certificate proves only the side of a caller. Credentials distinguish the workers of one side, and work
without certificates, too (`known-callers-only`).
"""

import hmac
import secrets
from collections import OrderedDict
from typing import Final

from baton.ids import Incarnation, Opener, RoomId
from baton.wire.conversions import Malformed
from baton.wire.errors import NotProven
from baton.wire.worker_credential import BYTES_MAX, BYTES_MIN, incarnation_of, of_ranks

KEPT_MAX: Final = 8192
"""Most credentials that are remembered. The least recently used one is forgotten first. There are far fewer
workers, and a live worker shows its credential with each renewal."""
KEY_BYTES: Final = 16


class CredentialStore:
    """Credentials of registered workers by incarnation, and the keys of rooms."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._known: OrderedDict[Incarnation, bytes] = OrderedDict()

    def check_new(self, incarnation: Incarnation, shown: bytes) -> None:
        """Check the credential of a worker that registers: the incarnation has to be derived from it
        (`exit-by-starter`).

        Raises NotProven if the incarnation belongs to another credential, and Malformed for bytes that are no
        credential.
        """
        if not BYTES_MIN <= len(shown) <= BYTES_MAX:
            raise Malformed(f"credential must have {BYTES_MIN} to {BYTES_MAX} bytes")
        if incarnation != incarnation_of(shown):
            raise NotProven(f"incarnation {incarnation} is not that of the credential that is shown")

    def enter(self, incarnation: Incarnation, credential: bytes) -> None:
        """Remember the credential of a registered worker."""
        self._known[incarnation] = credential
        self._known.move_to_end(incarnation)
        if len(self._known) > KEPT_MAX:
            self._known.popitem(last=False)

    def knows(self, incarnation: Incarnation) -> bool:
        return incarnation in self._known

    def check(self, incarnation: Incarnation, shown: bytes, rank: int = 0) -> None:
        """Check the credential that a caller shows for a worker. Raises NotProven. `rank`: the caller's rank;
        ranks other than 0 show a credential derived from the worker's."""
        own = self._known.get(incarnation, b"")
        wanted = of_ranks(own) if rank else own
        if not own or not hmac.compare_digest(wanted, shown):
            raise NotProven(f"who speaks for incarnation {incarnation} has not shown its credential")
        self._known.move_to_end(incarnation)

    def key_of(self, room: RoomId) -> bytes:
        """Return the key of a room. Whoever opened the room has to show it to end the room."""
        return hmac.digest(self._secret, room.to_bytes(8, "little"), "sha256")[:KEY_BYTES]

    def check_key(self, room: RoomId, shown: bytes) -> None:
        """Check the key that a caller shows for a room. Raises NotProven."""
        if not hmac.compare_digest(self.key_of(room), shown):
            raise NotProven(f"who speaks for room {room} has not shown the key that OpenRoom told")


def draw_opener() -> Opener:
    """Return a new random id for one run of a router."""
    return Opener(secrets.randbits(63) | 1)
