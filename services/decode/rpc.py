"""What may be asked of a decode worker? Each method parses, asks the turn loop, renders. No policy here."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from services.decode.job import replies_max
from services.decode.turn import DecodeWork
from services.ids import Incarnation
from services.wire.baton.v1 import group_pb2, inference_pb2, inference_pb2_grpc
from services.wire.channel import check_incarnation
from services.wire.conversions import room_from_wire
from services.wire.errors import Draining, errors_as_status
from services.worker.mailbox import Mailbox
from services.worker.shared_stream import SharedStream, stream_rooms_reply


class DecodeService(inference_pb2_grpc.DecodeServiceServicer):
    def __init__(self, work: DecodeWork, mailbox: Mailbox, incarnation: Incarnation) -> None:
        self._work = work
        self._mailbox = mailbox
        self._incarnation = incarnation

    async def StreamRoom(
        self, request: inference_pb2.StreamRoomRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.StreamRoomReply]:
        async with errors_as_status(context):
            command, most = self._judge(request)
            async with self._work.callers.calling(room_from_wire(request.room), command, most) as replies:
                over = False
                while not over:
                    reply = await replies.get()
                    yield reply
                    over = reply.HasField("outcome")

    async def StreamRooms(
        self, requests: AsyncIterator[inference_pb2.StreamRoomsRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.StreamRoomsReply]:
        shared = SharedStream(self._work.callers, self._judge, self._incarnation, self._end_choices)
        async with errors_as_status(context), shared.reading(requests), aclosing(shared.lines()) as messages:
            async for lines in messages:
                yield stream_rooms_reply(lines)

    async def _end_choices(self, request: inference_pb2.StreamRoomsRequest) -> None:
        """Raises Malformed for a choice that its room does not have, and what `Mailbox.ask` does."""
        for each in request.end_choices:
            check_incarnation(self._incarnation, each.incarnation)
        commands = [group_pb2.Command(end_choice=each) for each in request.end_choices]
        await asyncio.gather(*(self._mailbox.ask(command) for command in commands))

    def _judge(self, request: inference_pb2.StreamRoomRequest) -> tuple[group_pb2.Command, int]:
        """The command that opens the room, and how many replies it can have. Raises a Refusal. Whether the
        request makes sense is for the turn that takes it to say."""
        check_incarnation(self._incarnation, request.incarnation)
        if self._work.draining:
            raise Draining("this decode worker is draining")
        room_from_wire(request.room)
        return group_pb2.Command(stream=request), replies_max(request.request)
