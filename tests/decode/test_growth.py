"""Does a running room take pages as it draws, and does the youngest make space when none is left?"""

from dataclasses import replace

from services.rooms.phases import Phase
from services.rooms.request import Request
from tests.decode.bench import Caller, DecodeBench, decoding
from tests.prefill import toy

PROMPT = (3, 1, 4, 1)


def asked(room: int, arrived_ms: int, max_tokens: int = 20) -> Request:
    return replace(toy.request(str(room), PROMPT, max_tokens=max_tokens), arrived_ms=arrived_ms)


async def running(bench: DecodeBench, request: Request) -> Caller:
    caller = await bench.stream(request)
    await bench.granted(int(request.request_id))
    bench.land(request)
    await bench.turns_until(lambda: bench.phase(int(request.request_id)) is Phase.SUCCESS)
    return caller


async def test_a_grant_takes_the_prompts_pages_and_one_block_and_the_rest_comes_with_the_tokens() -> None:
    async with decoding(pages=8) as bench:
        caller = await bench.stream(asked(1, 1))
        await bench.granted(1)
        assert bench.holdings.available == (6,)
        bench.land(asked(1, 1))
        await bench.settle()
        assert await caller.outcome() == ""
        assert caller.tokens == toy.answer(asked(1, 1))
        bench.assert_empty()


async def test_oldest_goes_on_and_the_youngest_is_retracted_when_no_page_is_left() -> None:
    async with decoding(pages=8) as bench:
        young = await running(bench, asked(1, arrived_ms=9))
        old = await running(bench, asked(2, arrived_ms=5))
        await bench.settle()
        assert await old.outcome() == ""
        assert old.tokens == toy.answer(asked(2, 5))
        assert await young.outcome() == "retracted"
        told = young.tokens
        assert 1 < len(told) < 20
        assert told == toy.answer(asked(1, 9))[: len(told)]
        bench.assert_empty()


async def test_retracted_is_no_failure_its_request_goes_on_behind_what_it_has() -> None:
    async with decoding(pages=8, reuse=True) as bench:
        young = await running(bench, asked(1, arrived_ms=9))
        await running(bench, asked(1001, arrived_ms=5))
        await bench.settle()
        told = tuple(young.tokens)
        again = replace(asked(2001, arrived_ms=9), output=told)
        caller = await bench.stream(again)
        grant = await bench.granted(2001)
        assert grant.prefix_tokens >= len(PROMPT), "what it had computed is held"
        bench.land(again, first=toy.answer(asked(1, 9))[len(told)])
        await bench.settle()
        assert await caller.outcome() == ""
        assert [*told, *caller.tokens] == toy.answer(asked(1, 9))
        bench.assert_empty()
