"""What may be asked of a prefill worker? Each method parses, asks the turn loop, renders. No policy here."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import grpc

from services.pages.layout import KvLayout
from services.prefill.job import REPLIES_MAX
from services.prefill.turn import PrefillWork
from services.rooms.ids import Incarnation, RoomId
from services.wire.baton.v1 import group_pb2, inference_pb2, inference_pb2_grpc
from services.wire.channel import check_incarnation
from services.wire.conversions import layout_to_wire, room_from_wire
from services.wire.errors import Draining, errors_as_status
from services.wire.mailbox import Mailbox
from services.wire.shared_stream import SharedStream, run_rooms_reply

CLOSE_S = 4.0
"""How long a close may wait for a room's writes to end before it is to be asked again."""


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

    async def Connect(
        self, request: inference_pb2.ConnectRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ConnectReply:
        async with errors_as_status(context):
            check_incarnation(self._incarnation, request.incarnation)
            await self._mailbox.ask(group_pb2.Command(connect=request))
        return inference_pb2.ConnectReply(layouts=[layout_to_wire(each) for each in self._layouts])

    async def Grant(
        self, request: inference_pb2.GrantRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GrantReply:
        async with errors_as_status(context):
            check_incarnation(self._incarnation, request.incarnation)
            await self._mailbox.ask(group_pb2.Command(grant=request))
        return inference_pb2.GrantReply()

    async def Close(
        self, request: inference_pb2.CloseRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.CloseReply:
        async with errors_as_status(context):
            check_incarnation(self._incarnation, request.incarnation)
            await self._mailbox.ask(group_pb2.Command(close=request))
            await self._work.quiet(RoomId(request.room), CLOSE_S)
        return inference_pb2.CloseReply()
