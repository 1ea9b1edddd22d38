"""gRPC service of a decode worker, which opens rooms and streams their output tokens."""

import asyncio

from baton.decode.decode_room import replies_max
from baton.decode.decode_work import DecodeWork
from baton.rooms.phases import Side
from baton.wire.baton.v1 import group_pb2, inference_pb2, inference_pb2_grpc
from baton.wire.channel import check_incarnation
from baton.worker.room_service import RoomOpeningService


class DecodeService(
    RoomOpeningService[inference_pb2.StreamRoomReply], inference_pb2_grpc.DecodeServiceServicer
):
    side = Side.DECODE
    message = inference_pb2.StreamRoomsReply
    StreamRoom = RoomOpeningService.room
    StreamRooms = RoomOpeningService.rooms

    def __init__(self, work: DecodeWork) -> None:
        super().__init__(work, self._end_choices)

    def opening(self, request: inference_pb2.StreamRoomRequest) -> tuple[group_pb2.Command, int]:
        return group_pb2.Command(stream=request), replies_max(request.request)

    async def _end_choices(self, request: inference_pb2.StreamRoomsRequest) -> None:
        """End single choices of rooms, because the caller wants no more of them. Raises Malformed for a
        choice that its room does not have, and the errors of `Mailbox.ask`."""
        for each in request.end_choices:
            check_incarnation(self._incarnation, each.incarnation)
        commands = [group_pb2.Command(end_choice=each) for each in request.end_choices]
        await asyncio.gather(*(self._mailbox.submit(command) for command in commands))
