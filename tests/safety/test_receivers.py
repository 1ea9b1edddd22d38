"""Tests that nobody can have a room's KV written into memory of its own.

Real workers in processes of their own, over gRPC and NIXL, with certificates and without. The thief is a
decode worker too: it has the certificate of one, its own memory and its own secret, and says that it is the
room's receiver.
"""

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import grpc
import pytest

from baton.pages.record import SCHEMA_HASH
from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc
from baton.wire.errors import KIND_KEY
from baton.wire.layout_messages import layout_to_wire
from baton.wire.receiver_secret import digest_of
from baton.wire.service_role import ServiceRole
from tests.process.actors import Actor
from tests.process.pair import CALL_S, ReplyStream, WorkerTrio, plain_or_secure, until, workers
from tests.process.wide import LAYOUT
from tests.support.shared import Shared
from tests.wire.receivers import secret_of

pytestmark = pytest.mark.stack

PAGES: Final = 2


@pytest.fixture(scope="module", params=["plain", "certificates"])
def pairs(request: pytest.FixtureRequest, ours: Path) -> Iterator[Shared[WorkerTrio]]:
    certificates = ours if request.param == "certificates" else None
    with Shared(lambda: workers("tcp", certificates)) as shared:
        yield shared


@pytest.fixture
def pair(pairs: Shared[WorkerTrio], request: pytest.FixtureRequest) -> WorkerTrio:
    return pairs.lend(request.node)


@pytest.fixture
def thief(pair: WorkerTrio) -> Actor:
    return pair.start("decode")


class Forger:
    """A stream by which somebody speaks as the decode worker of the pair."""

    def __init__(self, pair: WorkerTrio, prefill: Actor, secret: bytes) -> None:
        self._channel = plain_or_secure(prefill.address, ServiceRole.PREFILL, pair.tls("decode"))
        self._says: SimpleQueue[inference_pb2.HandOverRequest | None] = SimpleQueue()
        greeting = inference_pb2.Greeting(
            incarnation=prefill.incarnation, receiver=pair.decode.incarnation, secret=secret
        )
        self._says.put(inference_pb2.HandOverRequest(greeting=greeting))
        stub = inference_pb2_grpc.HandoverServiceStub(self._channel)
        self.call = ReplyStream(stub.HandOver(iter(self._says.get, None), timeout=CALL_S))

    def say(self, **what: Any) -> None:
        self._says.put(inference_pb2.HandOverRequest(**what))

    def steal(self, room: int, thief: Actor) -> None:
        """Make the thief's memory the receiver's, under an id that the true one can never outbid, and have
        the room's pages written there."""
        endpoints = [inference_pb2.Endpoint.FromString(each) for each in thief.ask("endpoints")]
        exposure = endpoints[0].incarnation = 2**64 - 1
        layouts = [layout_to_wire(LAYOUT)]
        self.say(
            connect=inference_pb2.ConnectRequest(endpoints=endpoints, layouts=layouts, schema=SCHEMA_HASH)
        )
        self.say(
            grants=[
                inference_pb2.GrantRequest(
                    room=room,
                    generation=1,
                    pages=[inference_pb2.PageTable(pages=range(PAGES))],
                    exposure=exposure,
                )
            ]
        )
        self.say(closes=[inference_pb2.CloseRequest(room=room + 1_000, generation=1)])

    def refusal(self) -> str:
        """The kind of the error that ended the stream; nothing was said on it."""
        until(lambda: self.call.replies, "the stream ends")
        (error,) = self.call.replies
        assert isinstance(error, grpc.RpcError)
        trailing: Any = error
        return str(dict(trailing.trailing_metadata())[KIND_KEY])

    def leave(self) -> None:
        self._says.put(None)
        self.call.cancel()
        self._channel.close()


def test_authorised_writer_nobody_has_a_rooms_pages_written_into_memory_of_its_own(
    pair: WorkerTrio, thief: Actor
) -> None:
    """The thief uses a wrong secret, its own, none, or what is known of the true one."""
    prefill = pair.steady
    room = pair.begin(prefill, PAGES)
    true = secret_of(pair.decode.incarnation)
    for shown in (b"", true[:-1], secret_of(thief.incarnation), digest_of(true)):
        forger = Forger(pair, prefill, shown)
        forger.steal(room.id, thief)
        assert forger.refusal() == "NotAdmitted"
        forger.leave()
    pair.receive(room, prefill)
    room.check_answered()
    pair.open(prefill, 1).check_answered()
    assert not thief.ask("written")
    assert thief.ask("at_rest") == ""
    pair.wait_at_rest()


def test_the_control_without_the_check_the_pages_are_written_there(pair: WorkerTrio, thief: Actor) -> None:
    """The control: without the check the pages are written. It ends its own worker."""
    prefill = pair.start("prefill")
    pair.open(prefill, 1).check_answered()
    prefill.ask("believe")
    room = pair.begin(prefill, PAGES)
    forger = Forger(pair, prefill, b"")
    forger.steal(room.id, thief)
    until(lambda: thief.ask("written"), "the thief has the pages")
    forger.leave()
    prefill.kill()
    pair.decode.ask("depart", prefill.incarnation)
    pair.wait_at_rest()
