"""Tests of a loaded pair that shares prompts out by load: everything is given back."""

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from tests.oracle import reference_greedy
from tests.process.stack import Stack

REQUESTS = 200
AT_A_TIME = 32
OUTPUT_TOKENS = 8
PROMPTS = (
    "The capital of France is",
    "The capital of Japan is",
    "def add(a, b):",
    "One, two, three,",
    "Привет, как",
    "🎉🎈🥳 Party",
)


@pytest.mark.timeout(900)
async def test_hung_up_requests_leave_nothing_and_disturb_no_other(
    patient: Stack, demo_model_dir: Path
) -> None:
    """200 requests, 32 at a time, a third of them hung up at random points (seeded)."""
    start = patient.idle_gauges()
    rng = random.Random(20)
    async with httpx.AsyncClient(base_url=patient.url, timeout=300) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        prompts = [
            (await client.post("/tokenize", json={"model": model, "prompt": text})).json()["tokens"]
            for text in PROMPTS
        ]
        expected = reference_greedy(demo_model_dir, prompts, OUTPUT_TOKENS, "float32")
        places = asyncio.Semaphore(AT_A_TIME)

        async def whole(index: int) -> str | None:
            body = _body(model, prompts[index % len(prompts)])
            async with places:
                reply = await client.post("/v1/completions", json=body)
            if reply.status_code != 200:
                return f"request {index}: {reply.status_code} {reply.text}"
            ids = reply.json()["choices"][0]["token_ids"]
            want = expected[index % len(prompts)]
            return None if ids == want else f"request {index}: {ids} expected {want}"

        async def hung_up(index: int, after_s: float) -> None:
            body = _body(model, prompts[index % len(prompts)] * 20) | {"stream": True, "max_tokens": 64}
            async with places:
                try:
                    async with asyncio.timeout(after_s):
                        async with client.stream("POST", "/v1/completions", json=body) as reply:
                            async for _ in reply.aiter_lines():
                                pass
                except TimeoutError:
                    return

        async def one(index: int) -> str | None:
            if index % 3 != 0:
                return await whole(index)
            await hung_up(index, rng.uniform(0.0, 3.0))
            return None

        wrong = [text for text in await asyncio.gather(*map(one, range(REQUESTS))) if text]
    assert not wrong, "\n".join(wrong)
    patient.wait_idle(start)


def _body(model: str, prompt: list[int]) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
