"""Cancelling of a client's room at its decode worker, as the bootstrap does it.

CancelRoom is for the room's opener, which is the API itself.
"""

from typing import Final

import grpc

from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc, rooms_pb2, rooms_pb2_grpc
from baton.wire.run_token import TokenChannel

CALL_S: Final = 30.0


def opener_at(bootstrap: str, run_token: str = "") -> int:
    """Return the opener of the rooms of this bootstrap: of one that is opened, and reported answered."""
    with grpc.insecure_channel(bootstrap) as channel:
        rooms = rooms_pb2_grpc.RoomServiceStub(TokenChannel(channel, run_token))
        request = rooms_pb2.OpenRoomRequest(request_id="asks-its-opener", prompt_tokens=1, tokens=2)
        opened = rooms.OpenRoom(request, timeout=CALL_S)
        answered = rooms_pb2.RoomReport(room=opened.room, key=opened.key, outcome=rooms_pb2.Outcome())
        rooms.ReportRooms(rooms_pb2.ReportRoomsRequest(reports=[answered]), timeout=CALL_S)
        opener: int = opened.opener
    return opener


def cancel_room(bootstrap: str, room: int, why: str, run_token: str = "", opener: int = 0) -> None:
    with grpc.insecure_channel(bootstrap) as channel:
        rooms = rooms_pb2_grpc.RoomServiceStub(TokenChannel(channel, run_token))
        decode = rooms.GetRoom(rooms_pb2.GetRoomRequest(room=room), timeout=CALL_S).decode
    with grpc.insecure_channel(decode.address) as channel:
        cause = rooms_pb2.Cause(reason="cancelled", text=why)
        request = inference_pb2.CancelRequest(
            room=room, incarnation=decode.incarnation, cause=cause, opener=opener
        )
        stub = inference_pb2_grpc.DecodeServiceStub(TokenChannel(channel, run_token))
        asked = iter([inference_pb2.StreamRoomsRequest(cancel=[request])])
        for _ in stub.StreamRooms(asked, timeout=CALL_S):
            pass
