"""Prefill workers that send to a decode worker: one link to each (`baton.decode.sender_link`).

News from a link enters the next turn as a command. When this worker's memory is exposed anew, all senders
that knew it get the new addresses at once. If a sender has not seen the end of its writes, the new addresses
are the proof that they have ended.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from baton.decode.receiver_identity import ReceiverIdentity
from baton.decode.sender_link import SenderLink
from baton.ids import Generation, Incarnation, RoomId
from baton.transfer.transfer_protocol import Endpoint
from baton.wire.baton.v1 import inference_pb2, rooms_pb2
from baton.wire.channel import Channels
from baton.worker.assembly import RankPorts


class Peers(Protocol):
    """Calls that the turns of a decode rank make to prefill workers."""

    @property
    def shut_out(self) -> bool:
        """Whether the sender of some room refuses to connect to this worker's memory, because it has not seen
        the end of writes over a broken connection."""

    def connect(self, peer: rooms_pb2.Peer, room: RoomId) -> bool:
        """Make this worker's memory known to a prefill worker. Return True if it already is.

        Otherwise a command follows: `connected`, or a cancel of every room that waited for the connection.
        """

    def grant(self, peer: rooms_pb2.Peer, request: inference_pb2.GrantRequest) -> None:
        """Send a room's grant to its prefill worker as soon as the turn is over. A refusal cancels the
        room."""

    def close(self, peer: rooms_pb2.Peer, room: RoomId, generation: Generation) -> None:
        """Repeat the close of a room until its sender proves that it writes nothing more for (room,
        generation)."""

    def over(self, room: RoomId) -> None:
        """Stop all calls about a room: there is another proof that no write can land, or none is needed."""

    def forget(self, peer: Incarnation) -> None:
        """Forget a prefill worker whose process is gone. The same command ends its rooms."""

    def doubt(self, peer: Incarnation) -> None:
        """Make the next room connect anew to a prefill worker, because its connection may be broken. It costs
        nothing if the connection works (`reconnect`)."""

    def exposed_anew(self, endpoints: Sequence[inference_pb2.Endpoint]) -> None:
        """Announce a new exposure of this worker's memory, which no peer knows yet. `endpoints`: transfer
        endpoints of all ranks, in rank order."""

    async def stop(self) -> None:
        """Stop all calls to prefill workers."""


class LeaderPeers:
    """Links to prefill workers, by incarnation, on the leader. When a worker is gone, everything about it is
    forgotten.

    A channel is open to senders that know this worker's memory, and to others while a call waits for an
    answer.
    """

    def __init__(
        self,
        ports: RankPorts,
        channels: Channels,
        secret: bytes,
        connect_timeout_s: float,
    ) -> None:
        """Start without links. `secret`: proves this worker's incarnation to senders. `connect_timeout_s`:
        longest time in seconds for which a sender may refuse to connect."""
        self._mailbox = ports.mailbox
        self._channels = channels
        self._identity = ReceiverIdentity(ports.incarnation, secret, tuple(ports.layouts), ports.checksum)
        self.connect_timeout_s = connect_timeout_s
        self.shut_out = False
        self.links: dict[Incarnation, SenderLink] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def connect(self, peer: rooms_pb2.Peer, room: RoomId) -> bool:
        return self._link(peer).connect(room)

    def grant(self, peer: rooms_pb2.Peer, request: inference_pb2.GrantRequest) -> None:
        self._link(peer).grant(request)

    def close(self, peer: rooms_pb2.Peer, room: RoomId, generation: Generation) -> None:
        self._link(peer).close(room, generation)

    def over(self, room: RoomId) -> None:
        for link in list(self.links.values()):
            link.over(room)

    def forget(self, peer: Incarnation) -> None:
        link = self.links.get(peer)
        if link is not None:
            self._end(link)

    def doubt(self, peer: Incarnation) -> None:
        link = self.links.get(peer)
        if link is not None:
            link.connected = False

    def exposed_anew(self, endpoints: Sequence[inference_pb2.Endpoint]) -> None:
        self._identity.endpoints = endpoints
        self.shut_out = False
        for link in self.links.values():
            link.exposed_anew()

    async def stop(self) -> None:
        for link in list(self.links.values()):
            link.end()
            await link.wait_ended()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _link(self, peer: rooms_pb2.Peer) -> SenderLink:
        incarnation = Incarnation(peer.incarnation)
        link = self.links.get(incarnation)
        if link is None:
            link = self.links[incarnation] = SenderLink(
                peer,
                self._identity,
                self._mailbox,
                self._channels,
                lambda: self.connect_timeout_s,
                self._was_shut_out,
                self._end,
            )
        return link

    def _was_shut_out(self) -> None:
        self.shut_out = True

    def _end(self, link: SenderLink) -> None:
        """End a link that is no longer needed, or whose prefill worker is gone."""
        del self.links[link.incarnation]
        link.end()
        ending = asyncio.create_task(self._drop(link.incarnation))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _drop(self, peer: Incarnation) -> None:
        if peer not in self.links:  # it may have a new link by now
            await self._channels.drop(peer)


class FollowerPeers:
    """Peers of a rank that does not lead: all calls do nothing. The leader connects, grants and closes for
    its group, and the results come as commands."""

    shut_out: Final = False

    def connect(self, peer: rooms_pb2.Peer, room: RoomId) -> bool:  # noqa: ARG002
        return True  # the leader's vote decides when, not a follower's

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
