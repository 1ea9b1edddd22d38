"""Decode workers' secrets and peers, for tests."""

from baton.wire.baton.v1 import rooms_pb2
from baton.wire.receiver_secret import digest_of


def secret_of(incarnation: int) -> bytes:
    """Return the secret of this incarnation, which is the same in every run."""
    return incarnation.to_bytes(8, "big") * 2


def decode_peer(name: str, incarnation: int, address: str) -> rooms_pb2.Peer:
    """Return a decode worker as a room names it. Its secret is `secret_of` its incarnation."""
    digest = digest_of(secret_of(incarnation))
    return rooms_pb2.Peer(name=name, incarnation=incarnation, address=address, secret_digest=digest)
