"""Tests of the load that a prefill worker reports: the tokens it has to compute, and its speed."""

from collections.abc import AsyncIterator
from typing import Any

from baton.prefill.prefill_service import PrefillService
from baton.testing.memory_fabric import MemoryFabric
from baton.wire.baton.v1 import inference_pb2, rooms_pb2
from baton.wire.load_messages import load_from_wire
from tests.prefill import toy
from tests.prefill.bench import DECODE, PREFILL, PrefillBench, Receiver
from tests.prefill.test_turn import computing, settle

PROMPT = tuple(range(100, 110))


async def test_it_says_what_is_to_be_computed_less_what_is_cached() -> None:
    fabric = MemoryFabric()
    bench = PrefillBench(fabric, reuse=True)
    receiver = Receiver(fabric)  # its memory is written to
    bench.connect(receiver)
    assert load_from_wire(bench.work.load()).tokens_waiting == 0
    first = await bench.run(toy.request("7", PROMPT))
    waiting = load_from_wire(bench.work.load())
    assert (waiting.tokens_waiting, waiting.entered, waiting.free) == (len(PROMPT), 7, ())
    await bench.grant(7, (9, 2, 3))
    await computing(bench)
    bench.clock.advance(4)
    assert load_from_wire(bench.work.load()).tokens_waiting == len(PROMPT), "a step is done when it has ended"
    await settle(bench)
    assert await first.outcome() == ""
    idle = load_from_wire(bench.work.load())
    assert (idle.tokens_waiting, idle.entered) == (0, 0)
    assert (waiting.tokens_per_s, idle.tokens_per_s) == (0, 2_000), "eight tokens in 4 ms"
    await bench.run(toy.request("8", (*PROMPT, 1, 2)))
    again = load_from_wire(bench.work.load())
    assert again.tokens_waiting == len(PROMPT) + 2 - 8, "two pages of four tokens are held"
    assert waiting.number < idle.number < again.number
    await bench.cancel(8)
    await settle(bench)
    bench.close()


async def test_it_is_told_with_the_message_in_which_a_room_is_refused_or_ends() -> None:
    async def asked() -> AsyncIterator[inference_pb2.RunRoomsRequest]:
        peer = rooms_pb2.Peer(name="decode-0", incarnation=DECODE, address="127.0.0.1:1")
        stranger = inference_pb2.RunRoomRequest(room=1, incarnation=PREFILL + 1, decode=peer)
        yield inference_pb2.RunRoomsRequest(open=[stranger])

    nobody: Any = None
    bench = PrefillBench(MemoryFabric())
    service = PrefillService(bench.work)
    [message] = [each async for each in service.rooms(asked(), nobody)]
    assert message.lines[0].HasField("refused")
    assert load_from_wire(message.load).number == 1
    bench.close()
