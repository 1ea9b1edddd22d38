"""Do several workers of a side share the load, and can they leave and come back under it?"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.process.stack import Stack, running_stack

REQUESTS = 80
AT_A_TIME = 12
LEAVE_AFTER = 10


@pytest.fixture(scope="module")
def pairs(demo_model_dir: Path) -> Iterator[Stack]:
    with running_stack(
        str(demo_model_dir), prefill=[{}, {}], decode=[{}, {}], kv_cache_memory="128MiB"
    ) as stack:
        yield stack


async def test_workers_leave_and_return_and_no_request_fails(pairs: Stack) -> None:
    start = pairs.idle_gauges()
    answered = asyncio.Queue[int]()
    places = asyncio.Semaphore(AT_A_TIME)
    async with httpx.AsyncClient(base_url=pairs.url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def one(index: int) -> str:
            body = {"model": model, "prompt": f"Number {index}:", "max_tokens": 6, "temperature": 0}
            async with places:
                reply = await client.post("/v1/completions", json=body)
            answered.put_nowait(index)
            return f"{reply.status_code} {reply.text}"

        asking = asyncio.gather(*map(one, range(REQUESTS)))
        for _ in range(LEAVE_AFTER):
            await answered.get()
        leaving = [pairs.services["prefill-1"], pairs.services["decode-1"]]
        served = [each.total("baton_prefill_tokens_total") for each in leaving[:1]]
        assert served[0] > 0, "both prefill workers had work"
        codes = await asyncio.gather(*(asyncio.to_thread(each.stop) for each in leaving))
        replies = await asking
    assert [reply for reply in replies if not reply.startswith("200")] == []
    assert codes == [0, 0], pairs.tails()
    for each in leaving:
        pairs.restart(each.name)
    pairs.wait_ready(4)
    pairs.wait_idle(start)
