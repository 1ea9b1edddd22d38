"""Is whoever speaks for a worker, or for a room, the one whose it is?

Whom a certificate names is known to be of one side; these tell one worker of a side from another, and hold
where there are no certificates at all (`known-callers-only`).
"""

import hmac
import secrets
from collections import OrderedDict
from typing import Final

from baton.ids import Incarnation, RoomId
from baton.wire.conversions import Malformed
from baton.wire.errors import NotProven
from baton.wire.worker_credential import BYTES_MAX, BYTES_MIN, incarnation_of, of_ranks

KEPT_MAX: Final = 8192
"""Incarnations whose credential is remembered, those that spoke last: more than there are workers, by far.
One that lives shows its own with each renewal, and so is not forgotten for others that came and went."""
KEY_BYTES: Final = 16


class CredentialStore:
    """What every worker that registered here has to show, and the keys of rooms."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._known: OrderedDict[Incarnation, bytes] = OrderedDict()

    def check_new(self, incarnation: Incarnation, shown: bytes) -> None:
        """Before a registration: who registers by an incarnation may say goodbye for it (`exit-by-starter`).

        Raises NotProven if the incarnation is another credential's, Malformed for what is no credential.
        """
        if not BYTES_MIN <= len(shown) <= BYTES_MAX:
            raise Malformed(f"credential must have {BYTES_MIN} to {BYTES_MAX} bytes")
        if incarnation != incarnation_of(shown):
            raise NotProven(f"incarnation {incarnation} is not that of the credential that is shown")

    def enter(self, incarnation: Incarnation, credential: bytes) -> None:
        """It has registered."""
        self._known[incarnation] = credential
        self._known.move_to_end(incarnation)
        if len(self._known) > KEPT_MAX:
            self._known.popitem(last=False)

    def knows(self, incarnation: Incarnation) -> bool:
        return incarnation in self._known

    def check(self, incarnation: Incarnation, shown: bytes, rank: int = 0) -> None:
        """Raises NotProven unless a worker's process, or a rank that follows it, has shown its own."""
        own = self._known.get(incarnation, b"")
        wanted = of_ranks(own) if rank else own
        if not own or not hmac.compare_digest(wanted, shown):
            raise NotProven(f"who speaks for incarnation {incarnation} has not shown its credential")
        self._known.move_to_end(incarnation)

    def key_of(self, room: RoomId) -> bytes:
        """What the opener of a room shows to end it."""
        return hmac.digest(self._secret, room.to_bytes(8, "little"), "sha256")[:KEY_BYTES]

    def check_key(self, room: RoomId, shown: bytes) -> None:
        """Raises NotProven."""
        if not hmac.compare_digest(self.key_of(room), shown):
            raise NotProven(f"who speaks for room {room} has not shown the key that OpenRoom told")
