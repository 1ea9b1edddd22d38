"""Decode workers that may use this prefill worker: some room named them, and they prove their identity
(`authorised-writer`).

Only the leader has this table, because it is the only rank that other processes call. Its answers hold for
all ranks. So no rank can decide differently, and no secret is broadcast.
"""

from collections import OrderedDict
from typing import Final

from baton.ids import Incarnation
from baton.rooms.errors import PeerFault
from baton.wire.baton.v1 import rooms_pb2
from baton.wire.errors import NotAdmitted, UnknownReceiver
from baton.wire.receiver_secret import DIGEST_BYTES, matches_secret

NAMED_MAX: Final = 4_096
"""Most remembered decode workers, more than a deployment has alive. Beyond it, the one that was named longest
ago is forgotten until the next room names it."""


class Receivers:
    """Decode workers that rooms on this worker have named, by incarnation. Each entry has the digest of the
    worker's secret."""

    def __init__(self) -> None:
        self._digests: OrderedDict[Incarnation, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def name(self, peer: rooms_pb2.Peer) -> None:
        """Remember the decode worker that a room names. Raises PeerFault if the digest of its secret is
        missing, or differs from an earlier one."""
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
        """Check the secret by which a decode worker proves its identity. Raises UnknownReceiver if no room
        has named the worker, NotAdmitted for a wrong secret."""
        digest = self._digests.get(receiver)
        if digest is None:
            raise UnknownReceiver(f"no room has named receiver {receiver:#x}")
        if not matches_secret(secret, digest):
            raise NotAdmitted(f"this is not the secret of receiver {receiver:#x}")

    def forget(self, receiver: Incarnation) -> None:
        """Forget a decode worker whose process is gone. Idempotent."""
        self._digests.pop(receiver, None)
