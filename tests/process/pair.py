"""A pair of real workers whose bootstrap is the test, and the outcome of a room on it."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, Final

import grpc

from baton.rooms.request import Request
from baton.runtime.tls_files import TlsFiles
from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc, rooms_pb2
from baton.wire.conversions import request_to_wire, token_from_wire
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity
from tests.prefill import toy
from tests.process.actors import PAGES, Actor
from tests.process.wide import PAGE_TOKENS
from tests.safety.certificates import made
from tests.wire.receivers import decode_peer

TRANSPORTS: Final = {
    "tcp": {"UCX_TLS": "tcp", "UCX_TCP_SNDBUF": "128k", "UCX_TCP_RCVBUF": "128k"},
    "cma": {},
}
"""NIXL over sockets alone, and over the transport that UCX picks on this machine, usually cross-memory
attach. Socket buffers that may grow can take a whole write, which then ends without its sender."""
GPU: Final = "gpu"
"""Transport that UCX picks for a GPU's memory: usually copies by the GPU."""
LARGE: Final = 16
"""Pages of a room that does not fit beside another such."""
PATIENCE_S: Final = 60.0
CALL_S: Final = 60.0


def until(holds: Callable[[], Any], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up, f"never: {what}"
        time.sleep(0.001)


def plain_or_secure(address: str, party: ServiceRole, tls: TlsFiles | None) -> grpc.Channel:
    """Return a channel to the service `party`, with the certificate `tls` if given."""
    options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1)]
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", party.tls_name))
    return grpc.secure_channel(address, Identity(tls).channel(), options=options)


class ReplyStream:
    """A stream of replies, read as they come."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.replies: list[Any] = []
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for reply in self._stream:
                self.replies.append(reply)
        except grpc.RpcError as error:
            self.replies.append(error)

    def cancel(self) -> None:
        self._stream.cancel()

    def outcome(self) -> str:
        """Return why the room ended, or "" when it was answered."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the room does not end"
        last = self.replies[-1]
        if isinstance(last, grpc.RpcError):
            return str(last.code())
        return str(last.outcome.cause.reason) if last.outcome.HasField("cause") else ""

    def tokens(self) -> list[int]:
        return [
            token_from_wire(each).id
            for reply in self.replies
            if isinstance(reply, inference_pb2.StreamRoomReply)
            for each in reply.tokens.tokens
        ]


@dataclass
class AskedRoom:
    id: int
    asked: Request
    at_prefill: ReplyStream
    received: ReplyStream | None = None

    @property
    def at_decode(self) -> ReplyStream:
        assert self.received is not None, "its receiver has not heard of it"
        return self.received

    def check_answered(self) -> None:
        assert self.at_decode.outcome() == "", self.at_decode.replies
        assert self.at_decode.tokens() == toy.answer(self.asked)


class WorkerTrio:
    """A decode worker and two prefill workers; the test is their bootstrap."""

    def __init__(
        self, transport: str, folder: Path, certificates: Path | None = None, device: str = "cpu"
    ) -> None:
        """`certificates`: of every party, as `baton certs` makes them; without, connections are plain.
        `device`: where KV lies, "cpu" or "cuda:N"."""
        self._environment, self._folder = TRANSPORTS.get(transport, {}), folder
        self._device = device
        self._certificates = certificates
        self._numbers = count()
        self._rooms = count(1)
        self._channels: dict[str, grpc.Channel] = {}
        self._actors: list[Actor] = []
        self.decode = self.start("decode")
        self.stopped, self.steady = self.start("prefill"), self.start("prefill")

    def start(self, side: str, **options: Any) -> Actor:
        """Start another worker, which ends with this object's `close` at the latest."""
        output = self._folder / f"{next(self._numbers)}-{side}.txt"
        actor = Actor(side, self._environment, output, tls=self.tls(side), device=self._device, **options)
        self._actors.append(actor)
        self._channels.pop(actor.address, None)  # of an earlier process at the same address
        return actor

    def open(self, prefill: Actor, pages: int, max_tokens: int = 4) -> AskedRoom:
        """Open a room on `prefill` and the decode worker, with a prompt that fills `pages` pages."""
        room = self.begin(prefill, pages, max_tokens)
        self.receive(room, prefill)
        return room

    def authority(self) -> Path:
        """Certificates of every party, made when they are first needed."""
        folder = self._certificates or self._folder / "certs"
        return folder if folder.exists() else made(folder)

    def tls(self, party: str) -> TlsFiles | None:
        folder = self._certificates
        if folder is None:
            return None
        return TlsFiles(folder / f"{party}.crt", folder / f"{party}.key", folder / "ca.crt")

    def begin(self, prefill: Actor, pages: int, max_tokens: int = 4) -> AskedRoom:
        """Open a room on its sender, but not on its receiver yet."""
        room = next(self._rooms)
        asked = toy.request(str(room), [(room + at) % 900 for at in range(pages * PAGE_TOKENS)], max_tokens)
        wire = request_to_wire(asked)
        send = inference_pb2.RunRoomRequest(
            room=room,
            incarnation=prefill.incarnation,
            decode=decode_peer("decode", self.decode.incarnation, self.decode.address),
            request=wire,
        )
        prefill_stub = inference_pb2_grpc.PrefillServiceStub(self._channel(prefill))
        at_prefill = ReplyStream(prefill_stub.RunRoom(send, timeout=CALL_S))
        until(lambda: at_prefill.replies, "the sender has the room before its destination comes")
        return AskedRoom(room, asked, at_prefill)

    def receive(self, room: AskedRoom, prefill: Actor) -> None:
        receive = inference_pb2.StreamRoomRequest(
            room=room.id,
            incarnation=self.decode.incarnation,
            prefill=rooms_pb2.Peer(name="prefill", incarnation=prefill.incarnation, address=prefill.address),
            request=request_to_wire(room.asked),
        )
        decode_stub = inference_pb2_grpc.DecodeServiceStub(self._channel(self.decode))
        room.received = ReplyStream(decode_stub.StreamRoom(receive, timeout=CALL_S))

    def _channel(self, actor: Actor) -> grpc.Channel:
        if actor.address not in self._channels:
            party = ServiceRole.DECODE if actor is self.decode else ServiceRole.PREFILL
            self._channels[actor.address] = plain_or_secure(actor.address, party, self.tls("bootstrap"))
        return self._channels[actor.address]

    def warm_up(self) -> None:
        for prefill in (self.stopped, self.steady):
            self.open(prefill, 1).check_answered()

    def quarantined(self) -> int:
        pages: int = self.decode.ask("pages")["quarantined"]
        return pages

    def wait_at_rest(self) -> None:
        """Wait until every room is retired, every page free and every gauge at rest (`zero-at-idle`)."""
        for actor in (self.decode, self.stopped, self.steady):
            until(lambda actor=actor: not actor.ask("rooms"), "every room retires")  # type: ignore[misc]
            until(lambda actor=actor: not actor.ask("at_rest"), actor.ask("at_rest"))  # type: ignore[misc]
        assert self.decode.ask("pages")["free"] == PAGES

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        for actor in self._actors:
            actor.kill()


@contextmanager
def workers(transport: str, certificates: Path | None = None, device: str = "cpu") -> Iterator[WorkerTrio]:
    with tempfile.TemporaryDirectory(prefix="baton-late-") as folder:
        pair = WorkerTrio(transport, Path(folder), certificates, device)
        try:
            pair.warm_up()
            yield pair
        finally:
            pair.close()
