"""Cancelling of a client's room at its decode worker, as the bootstrap does it.

CancelRoom is for the room's opener, which is the API itself.
"""

from typing import Final

import grpc

from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc, rooms_pb2, rooms_pb2_grpc
from baton.wire.run_token import TokenChannel

CALL_S: Final = 30.0


def cancel_room(bootstrap: str, room: int, why: str, run_token: str = "") -> None:
    with grpc.insecure_channel(bootstrap) as channel:
        rooms = rooms_pb2_grpc.RoomServiceStub(TokenChannel(channel, run_token))
        decode = rooms.GetRoom(rooms_pb2.GetRoomRequest(room=room), timeout=CALL_S).decode
    with grpc.insecure_channel(decode.address) as channel:
        cause = rooms_pb2.Cause(reason="cancelled", text=why)
        request = inference_pb2.CancelRequest(room=room, incarnation=decode.incarnation, cause=cause)
        stub = inference_pb2_grpc.DecodeServiceStub(TokenChannel(channel, run_token))
        asked = iter([inference_pb2.StreamRoomsRequest(cancel=[request])])
        for _ in stub.StreamRooms(asked, timeout=CALL_S):
            pass
