"""Random tests that a peer's messages on a hand-over stream end at most its own rooms or its own stream."""

import asyncio
from collections.abc import AsyncIterator

from hypothesis import event, given, settings
from hypothesis import strategies as st

from baton.prefill.handover_stream import HandOverStream
from baton.rooms.errors import PeerFault, Refusal
from baton.testing.memory_fabric import MemoryFabric
from baton.wire.baton.v1 import inference_pb2
from tests.decode.bench import decoding
from tests.decode.links import asking, links_of
from tests.prefill import toy
from tests.prefill.bench import DECODE, PREFILL, PrefillBench, Receiver
from tests.wire import test_fuzz_decode, test_fuzz_prefill
from tests.wire.fuzz import messages
from tests.wire.receivers import decode_peer, secret_of
from tests.wire.test_fuzz_prefill import GOOD, GRANTED, OTHER, PROMPT, SLOT

SPOKEN = st.lists(messages(inference_pb2.HandOverRequest, test_fuzz_prefill.LIKELY), max_size=6)
HEARD = st.lists(messages(inference_pb2.HandOverReply, test_fuzz_decode.LIKELY), max_size=6)


async def speak(said: list[inference_pb2.HandOverRequest], greeted: bool) -> None:
    """Send requests as another decode worker, while a good room is handed over to its own."""
    fabric = MemoryFabric()
    receivers = Receiver(fabric), Receiver(fabric, OTHER)
    bench = PrefillBench(fabric)
    for incarnation in (DECODE, OTHER):
        bench.work.receivers.name(decode_peer("decode", incarnation, "127.0.0.1:1"))

    async def requests() -> AsyncIterator[inference_pb2.HandOverRequest]:
        greeting = inference_pb2.Greeting(incarnation=PREFILL, receiver=OTHER, secret=secret_of(OTHER))
        if greeted:
            yield inference_pb2.HandOverRequest(greeting=greeting)
        for message in said:
            if greeted:
                message.ClearField("greeting")
            yield message

    stream = HandOverStream(bench.work)
    try:
        bench.connect(receivers[0])
        caller = await bench.run(toy.request(str(GOOD), PROMPT))
        async with stream.reading(requests(), lambda _: None):
            for _ in range(2 * len(said) + 2):
                await asyncio.sleep(0)
                await bench.turn()
            try:
                answers = [answer async for answer in stream.messages()]
                event(f"{len(answers)} answers")
            except (Refusal, PeerFault) as error:
                event(type(error).__name__)
            await bench.grant(GOOD, GRANTED, slot=SLOT)
            await test_fuzz_prefill.turn_until(bench, caller.task.done)
        assert await caller.outcome() == ""
        test_fuzz_prefill.handed_over(receivers[0])
        await test_fuzz_prefill.end_the_rest(bench)
        bench.assert_empty()
    finally:
        bench.close()
        for receiver in receivers:
            receiver.transfer.close()


@settings(max_examples=settings().max_examples // 4)
@given(SPOKEN, st.booleans())
def test_what_a_receiver_says_ends_nobody_elses_rooms(
    said: list[inference_pb2.HandOverRequest], greeted: bool
) -> None:
    asyncio.run(speak(said, greeted))


async def hear(replies: list[inference_pb2.HandOverReply]) -> None:
    """Receive replies of a sender on other rooms than the good one, whose grant it has answered already."""
    async with decoding() as bench:
        bench.sender.quiet.set()
        asked = test_fuzz_decode.ASKED
        caller = await bench.stream(asked)
        await bench.granted(test_fuzz_decode.GOOD)
        await bench.turns_until(lambda: not asking(bench.peers))
        link = links_of(bench.peers)[PREFILL]
        for reply in replies:
            for closed in reply.closes:
                closed.room += closed.room == test_fuzz_decode.GOOD
            link._receive(reply)
            await bench.turn()
        bench.land(asked)
        await bench.turns_until(caller.task.done)
        assert await caller.outcome() == ""
        assert caller.tokens == toy.answer(asked)
        await bench.settle()
        bench.assert_empty()


@settings(max_examples=settings().max_examples // 8)
@given(HEARD)
def test_what_a_sender_says_ends_nobody_elses_rooms(replies: list[inference_pb2.HandOverReply]) -> None:
    asyncio.run(hear(replies))
