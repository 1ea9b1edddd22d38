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
from baton.handover.requests import ClaimRoom, Grant
from baton.ids import Generation, Incarnation, RoomId
from baton.transfer.transfer_protocol import Endpoint
from baton.wire.baton.v1 import inference_pb2, rooms_pb2
from baton.wire.channel import Channels
from baton.worker.assembly import RankPorts


class Peers(Protocol):
    """Calls that the turns of a decode rank make to prefill workers."""

    @property
    def shut_out(self) -> bool:
        """Whether some sender refuses to connect to this worker's memory, because writes over an earlier,
        broken connection may still be under way."""

    def connect(self, peer: rooms_pb2.Peer, room: RoomId) -> bool:
        """Make this worker's memory known to a prefill worker, for a room. Return True if it already is.

        Otherwise a command follows with the result: `connected`, or a cancel of every room that waited for
        the connection.
        """

    def grant(self, peer: rooms_pb2.Peer, grant: Grant | ClaimRoom) -> None:
        """Send a room's grant to its prefill worker when the present turn has ended. If the worker refuses
        it, the room is cancelled."""

    def close(self, peer: rooms_pb2.Peer, room: RoomId, generation: Generation) -> None:
        """Repeat the close of a room until its sender proves that it writes nothing more for (room,
        generation)."""

    def over(self, room: RoomId) -> None:
        """Stop all calls about a room, because no write to its memory can land any more, or its memory was
        never exposed."""

    def forget(self, peer: Incarnation) -> None:
        """Forget a prefill worker whose process has ended. The rooms that it sends are ended elsewhere, by
        the same command."""

    def doubt(self, peer: Incarnation) -> None:
        """Make the next room connect to a prefill worker again, because the present connection may be broken.
        This costs nothing if the connection works (`reconnect`)."""

    def exposed_anew(self, endpoints: Sequence[inference_pb2.Endpoint]) -> None:
        """Announce a new exposure of this worker's memory, which no peer knows yet. `endpoints`: transfer
        endpoints of all ranks, in rank order."""

    async def stop(self) -> None:
        """Stop all calls to prefill workers."""


class LeaderPeers:
    """Links of the leader rank to prefill workers, by incarnation. When a worker is gone, its link and
    everything else about it is dropped.

    A channel stays open to senders that know this worker's memory. To other senders it is open while a call
    waits for an answer.
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

    def grant(self, peer: rooms_pb2.Peer, grant: Grant | ClaimRoom) -> None:
        self._link(peer).grant(grant)

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
            link.session.doubt()

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
        """End the link to a prefill worker that is gone, or for which no room needs a link any more."""
        del self.links[link.incarnation]
        link.end()
        ending = asyncio.create_task(self._drop(link.incarnation))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _drop(self, peer: Incarnation) -> None:
        if peer not in self.links:  # it may have a new link by now
            await self._channels.drop(peer)


class FollowerPeers:
    """Peers of a rank that is not the leader: all calls do nothing. The leader connects, grants and closes
    for the whole worker, and every rank gets the results as commands."""

    shut_out: Final = False

    def connect(self, peer: rooms_pb2.Peer, room: RoomId) -> bool:  # noqa: ARG002
        return True  # the leader's vote decides when, not a follower's

    def grant(self, peer: rooms_pb2.Peer, grant: Grant | ClaimRoom) -> None: ...

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
