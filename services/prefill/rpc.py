"""What may be asked of a prefill worker? Each method parses, asks the turn loop, renders. No policy here."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import grpc

from services.ids import Incarnation
from services.pages.layout import KvLayout
from services.prefill.handover import HandOverStream
from services.prefill.job import REPLIES_MAX
from services.prefill.turn import PrefillWork
from services.rooms.errors import PeerFault
from services.wire.baton.v1 import group_pb2, inference_pb2, inference_pb2_grpc
from services.wire.channel import check_incarnation
from services.wire.conversions import check_peer, room_from_wire
from services.wire.errors import Draining, errors_as_status
from services.worker.mailbox import Mailbox
from services.worker.shared_stream import SharedStream, run_rooms_reply


class PrefillService(inference_pb2_grpc.PrefillServiceServicer):
    def __init__(self, work: PrefillWork, mailbox: Mailbox, incarnation: Incarnation) -> None:
        self._work = work
        self._mailbox = mailbox
        self._incarnation = incarnation

    async def RunRoom(
        self, request: inference_pb2.RunRoomRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.RunRoomReply]:
        async with errors_as_status(context):
            command, most = self._judge(request)
            async with self._work.callers.calling(room_from_wire(request.room), command, most) as replies:
                over = False
                while not over:
                    reply = await replies.get()
                    yield reply
                    over = reply.HasField("outcome")

    async def RunRooms(
        self, requests: AsyncIterator[inference_pb2.RunRoomsRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.RunRoomsReply]:
        shared = SharedStream(self._work.callers, self._judge, self._incarnation)
        async with errors_as_status(context), shared.reading(requests), aclosing(shared.lines()) as messages:
            async for lines in messages:
                yield run_rooms_reply(lines)

    def _judge(self, request: inference_pb2.RunRoomRequest) -> tuple[group_pb2.Command, int]:
        """The command that opens the room, and how many replies it can have. Raises a Refusal."""
        check_incarnation(self._incarnation, request.incarnation)
        if self._work.draining:
            raise Draining("this prefill worker is draining")
        room_from_wire(request.room)
        check_peer(request.decode, "decode")
        self._work.receivers.name(request.decode)
        return group_pb2.Command(run=request), REPLIES_MAX


class HandoverService(inference_pb2_grpc.HandoverServiceServicer):
    def __init__(
        self,
        work: PrefillWork,
        mailbox: Mailbox,
        incarnation: Incarnation,
        layouts: Sequence[KvLayout],
    ) -> None:
        """`layouts`: of every rank of this worker."""
        self._work = work
        self._mailbox = mailbox
        self._incarnation = incarnation
        self._layouts = tuple(layouts)
        self._streams: dict[Incarnation, HandOverStream] = {}
        """One of each receiver that speaks: the latest."""

    async def HandOver(
        self,
        requests: AsyncIterator[inference_pb2.HandOverRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[inference_pb2.HandOverReply]:
        stream = HandOverStream(self._work, self._mailbox, self._incarnation, self._layouts)
        try:
            async with (
                errors_as_status(context),
                stream.reading(requests, self._greeted),
                aclosing(stream.messages()) as messages,
            ):
                async for message in messages:
                    yield message
        finally:
            if stream.receiver is not None and self._streams.get(stream.receiver) is stream:
                del self._streams[stream.receiver]

    def leave(self) -> None:
        """End every stream: this worker holds nothing that anyone could still ask of it."""
        for stream in self._streams.values():
            stream.end()

    def _greeted(self, stream: HandOverStream) -> None:
        if stream.receiver is None:
            raise AssertionError("nobody has greeted")
        before = self._streams.get(stream.receiver)
        if before is not None:
            before.end(PeerFault("another stream of this receiver took the place of this one"))
        self._streams[stream.receiver] = stream
