"""Does a loaded real stack give everything back, also for clients that hang up?"""

import asyncio
import json
import random
from pathlib import Path

import httpx
import psutil
import pytest

from tests.http import web
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
IDLE_SECONDS = 2.0
IDLE_SHARE_MAX = 0.05
IDLE_TRIES = 8


@pytest.mark.timeout(900)
async def test_hung_up_requests_leave_nothing_and_disturb_no_other(
    idle_stack: Stack, demo_model_dir: Path
) -> None:
    """200 requests, 32 at a time, a third of them hung up at random points (seeded)."""
    rng = random.Random(20)
    async with httpx.AsyncClient(base_url=idle_stack.url, timeout=300) as client:
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


def _body(model: str, prompt: list[int]) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }


def test_transferred_bytes_are_the_bytes_of_the_prompts_pages(
    idle_stack: Stack, demo_model_dir: Path
) -> None:
    """A page holds 16 tokens of all layers: whole pages travel, no more and no fewer."""
    prefill = idle_stack.services["prefill-0"]
    model = web().get(f"{idle_stack.url}/v1/models").json()["data"][0]["id"]
    config = json.loads((demo_model_dir / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 4
    before = prefill.total("baton_kv_transfer_bytes_total")
    lengths = (1, 15, 16, 17, 100, 257)
    for length in lengths:
        body = _body(model, [1_000 + length] * length)  # of which no two begin alike
        assert web().post(f"{idle_stack.url}/v1/completions", json=body, timeout=120).status_code == 200
    pages = sum(-(-length // 16) for length in lengths)
    assert prefill.total("baton_kv_transfer_bytes_total") - before == pages * 16 * token_bytes


async def test_an_idle_stack_sleeps(idle_stack: Stack) -> None:
    """All services together use less than 5 % of one core: of processor time, not of the clock's. Soon after
    their start they may still be given their memory, which ends."""
    processes = [psutil.Process(service.process.pid) for service in idle_stack.services.values()]
    shares: list[float] = []
    while len(shares) < IDLE_TRIES and (not shares or shares[-1] >= IDLE_SHARE_MAX):
        before = [process.cpu_times() for process in processes]
        await asyncio.sleep(IDLE_SECONDS)
        after = [process.cpu_times() for process in processes]
        used = sum(
            end.user + end.system - start.user - start.system
            for start, end in zip(before, after, strict=True)
        )
        shares.append(used / IDLE_SECONDS)
    assert shares[-1] < IDLE_SHARE_MAX, shares


def test_each_service_is_a_process_of_its_own(idle_stack: Stack) -> None:
    pids = {service.process.pid for service in idle_stack.services.values()}
    assert len(pids) == 3
    commands = [psutil.Process(pid).cmdline() for pid in pids]
    assert {word for command in commands for word in command} >= {"bootstrap", "prefill", "decode"}
