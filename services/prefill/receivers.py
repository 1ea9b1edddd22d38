"""Which decode workers may speak to this prefill worker?

Those that a room named, and that prove to be it (`authorised-writer`). Kept by the leader alone: it is the
only rank that anybody outside reaches, and what it lets in is the same for every rank behind it. So no rank
can come to another answer than the leader's, and no secret is broadcast.
"""

from collections import OrderedDict
from typing import Final

from baton.ids import Incarnation
from baton.rooms.errors import PeerFault
from baton.wire.baton.v1 import rooms_pb2
from baton.wire.errors import NotAdmitted, UnknownReceiver
from baton.wire.receiver_secret import DIGEST_BYTES, matches_secret

NAMED_MAX: Final = 4_096
"""Above what a stack has of decode workers that are not known to be gone. Past it the one that was named
longest ago is forgotten: the next room names it again."""


class Receivers:
    """Keyed by incarnation. Forgotten with it."""

    def __init__(self) -> None:
        self._digests: OrderedDict[Incarnation, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def name(self, peer: rooms_pb2.Peer) -> None:
        """A room is for this decode worker. Raises PeerFault when the peer names no digest of a secret, or
        another one than an earlier room did."""
        receiver = Incarnation(peer.incarnation)
        if len(peer.secret_digest) != DIGEST_BYTES:
            raise PeerFault(f"decode worker {peer.name[:64]!r} comes without the digest of its secret")
        known = self._digests.setdefault(receiver, peer.secret_digest)
        if known != peer.secret_digest:
            raise PeerFault(
                f"an earlier room named another secret for incarnation {receiver:#x} of a decode worker"
            )
        self._digests.move_to_end(receiver)
        if len(self._digests) > NAMED_MAX:
            self._digests.popitem(last=False)

    def check(self, receiver: Incarnation, secret: bytes) -> None:
        """Raises UnknownReceiver when no room has named it (yet, or any more), NotAdmitted when the secret is
        another one."""
        digest = self._digests.get(receiver)
        if digest is None:
            raise UnknownReceiver(f"no room has named receiver {receiver:#x}")
        if not matches_secret(secret, digest):
            raise NotAdmitted(f"this is not the secret of receiver {receiver:#x}")

    def forget(self, receiver: Incarnation) -> None:
        """Its process is gone. Idempotent."""
        self._digests.pop(receiver, None)
