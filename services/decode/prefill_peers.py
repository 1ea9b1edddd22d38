"""Which prefill workers does a decode worker receive from, and what have they been told?

One link to each (`baton.decode.sender_link`). What is learnt over it enters the next turn as a command.
When our memory is exposed anew, every sender that knew of it is told at once: that it was taken back is the
proof for a sender that saw no end of its writes.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from baton.decode.sender_link import ReceiverIdentity, SenderLink
from baton.ids import Generation, Incarnation, RoomId
from baton.transfer.transfer_protocol import Endpoint
from baton.wire.baton.v1 import inference_pb2, rooms_pb2
from baton.wire.channel import Channels
from baton.worker.assembly import RankPorts


class Peers(Protocol):
    """What a rank's turns ask of the senders, on every rank."""

    @property
    def shut_out(self) -> bool:
        """A sender that a room is for does not connect to this exposure of our memory any more: it has not
        seen the end of what it wrote by a way that broke."""

    def connect(self, peer: rooms_pb2.Peer, room: RoomId) -> bool:
        """Make our memory known to a peer. True when it already is; else a command tells what became of
        it: `connected`, or a cancel of every room that waited."""

    def grant(self, peer: rooms_pb2.Peer, request: inference_pb2.GrantRequest) -> None:
        """Send a destination, as soon as the turn is over. A refusal cancels the room."""

    def close(self, peer: rooms_pb2.Peer, room: RoomId, generation: Generation) -> None:
        """Ask until it is proven that nothing more is written for (room, generation)."""

    def over(self, room: RoomId) -> None:
        """Nothing more is wanted for the room: another proof came first, or none was needed."""

    def forget(self, peer: Incarnation) -> None:
        """Its process is gone: who waited for it was told by the same news."""

    def doubt(self, peer: Incarnation) -> None:
        """A room with it went wrong on the way: the next one connects anew, which costs nothing where the
        way still holds (`reconnect`)."""

    def exposed_anew(self, endpoints: Sequence[inference_pb2.Endpoint]) -> None:
        """Our memory is exposed, first or anew: every rank has told where, in rank order, and nobody else
        knows it."""

    async def stop(self) -> None:
        """Nothing more is asked of any sender."""


class LeaderPeers:
    """Keyed by incarnation. The leader's; a departed peer is forgotten with everything about it. A channel is
    open to who knows of our memory, and to others while something is asked of them."""

    def __init__(
        self,
        ports: RankPorts,
        channels: Channels,
        secret: bytes,
        connect_timeout_s: float,
    ) -> None:
        """`secret`: proof of this worker's incarnation, by which senders know it."""
        self._mailbox = ports.mailbox
        self._channels = channels
        self._identity = ReceiverIdentity(ports.incarnation, secret, tuple(ports.layouts), ports.checksum)
        self._connect_timeout_s = connect_timeout_s
        self.shut_out = False
        self._links: dict[Incarnation, SenderLink] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def connect(self, peer: rooms_pb2.Peer, room: RoomId) -> bool:
        return self._link(peer).connect(room)

    def grant(self, peer: rooms_pb2.Peer, request: inference_pb2.GrantRequest) -> None:
        self._link(peer).grant(request)

    def close(self, peer: rooms_pb2.Peer, room: RoomId, generation: Generation) -> None:
        self._link(peer).close(room, generation)

    def over(self, room: RoomId) -> None:
        for link in list(self._links.values()):
            link.over(room)

    def forget(self, peer: Incarnation) -> None:
        link = self._links.get(peer)
        if link is not None:
            self._end(link)

    def doubt(self, peer: Incarnation) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.connected = False

    def exposed_anew(self, endpoints: Sequence[inference_pb2.Endpoint]) -> None:
        self._identity.endpoints = endpoints
        self.shut_out = False
        for link in self._links.values():
            link.exposed_anew()

    async def stop(self) -> None:
        for link in list(self._links.values()):
            link.end()
            await link.wait_ended()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _link(self, peer: rooms_pb2.Peer) -> SenderLink:
        incarnation = Incarnation(peer.incarnation)
        link = self._links.get(incarnation)
        if link is None:
            link = self._links[incarnation] = SenderLink(
                peer,
                self._identity,
                self._mailbox,
                self._channels,
                lambda: self._connect_timeout_s,
                self._was_shut_out,
                self._end,
            )
        return link

    def _was_shut_out(self) -> None:
        self.shut_out = True

    def _end(self, link: SenderLink) -> None:
        """Nothing is left to be said to this sender, or nobody there to hear it."""
        del self._links[link.incarnation]
        link.end()
        ending = asyncio.create_task(self._drop(link.incarnation))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _drop(self, peer: Incarnation) -> None:
        if peer not in self._links:  # it may be spoken to again by now
            await self._channels.drop(peer)


class FollowerPeers:
    """Of a rank that does not lead: the leader connects, grants and closes for its group, and what it learns
    comes as commands."""

    shut_out: Final = False

    def connect(self, peer: rooms_pb2.Peer, room: RoomId) -> bool:  # noqa: ARG002
        return True  # not for a follower to hold up: the leader's vote says when

    def grant(self, peer: rooms_pb2.Peer, request: inference_pb2.GrantRequest) -> None: ...

    def close(self, peer: rooms_pb2.Peer, room: RoomId, generation: Generation) -> None: ...

    def over(self, room: RoomId) -> None: ...

    def forget(self, peer: Incarnation) -> None: ...

    def doubt(self, peer: Incarnation) -> None: ...

    def exposed_anew(self, endpoints: Sequence[inference_pb2.Endpoint]) -> None: ...

    async def stop(self) -> None: ...


def endpoint_to_wire(endpoint: Endpoint) -> inference_pb2.Endpoint:
    return inference_pb2.Endpoint(
        incarnation=endpoint.incarnation,
        agent=endpoint.agent,
        metadata=endpoint.metadata,
        regions=[
            inference_pb2.Region(name=each.name, address=each.address, length=each.length, device=each.device)
            for each in endpoint.regions
        ],
    )
