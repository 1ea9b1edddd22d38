"""gRPC services of a prefill worker: one opens rooms, the other hands them over to decode workers."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from baton.ids import Incarnation
from baton.prefill.handover_stream import HandOverStream
from baton.prefill.prefill_room import REPLIES_MAX
from baton.prefill.prefill_work import PrefillWork
from baton.rooms.errors import PeerFault
from baton.rooms.phases import Side
from baton.wire.baton.v1 import group_pb2, inference_pb2, inference_pb2_grpc
from baton.wire.conversions import check_peer
from baton.wire.errors import errors_as_status
from baton.worker.room_service import RoomOpeningService


class PrefillService(
    RoomOpeningService[inference_pb2.RunRoomReply], inference_pb2_grpc.PrefillServiceServicer
):
    side = Side.PREFILL
    message = inference_pb2.RunRoomsReply
    RunRoom = RoomOpeningService.room
    RunRooms = RoomOpeningService.rooms

    def __init__(self, work: PrefillWork) -> None:
        super().__init__(work)
        self._receivers = work.receivers

    def opening(self, request: inference_pb2.RunRoomRequest) -> tuple[group_pb2.Command, int]:
        check_peer(request.decode, "decode")
        self._receivers.name(request.decode)
        return group_pb2.Command(run=request), REPLIES_MAX


class HandoverService(inference_pb2_grpc.HandoverServiceServicer):
    def __init__(self, work: PrefillWork) -> None:
        self._work = work
        self.streams: dict[Incarnation, HandOverStream] = {}
        """Latest stream of each decode worker, by the incarnation of the decode worker."""

    async def HandOver(
        self,
        requests: AsyncIterator[inference_pb2.HandOverRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[inference_pb2.HandOverReply]:
        stream = HandOverStream(self._work)
        try:
            async with (
                errors_as_status(context),
                stream.reading(requests, self._greeted),
                aclosing(stream.messages()) as messages,
            ):
                async for message in messages:
                    yield message
        finally:
            if stream.receiver is not None and self.streams.get(stream.receiver) is stream:
                del self.streams[stream.receiver]

    async def leave(self) -> None:
        """End the streams of all decode workers, after the last turn of this worker."""
        for stream in self.streams.values():
            stream.end()

    def _greeted(self, stream: HandOverStream) -> None:
        if stream.receiver is None:
            raise AssertionError("nobody has greeted")
        before = self.streams.get(stream.receiver)
        if before is not None:
            before.end(PeerFault("another stream of this receiver took the place of this one"))
        self.streams[stream.receiver] = stream
