"""Do workers of several ranks serve what the reference library says, whatever the shapes of the two sides?

Real processes, float32, greedy output token for token, 16 requests at a time of which some hang up in
mid-stream; afterwards every gauge of every rank is back where it was. The small model's shapes are all there;
of the demo model's, `make test-all` has one and `make verify-groups` all.
"""

import asyncio
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.http import web
from tests.models import VOCABULARY, eight_heads
from tests.process.load import ANSWER_S, Asked, Load, Pair, any_prompts, asked
from tests.process.stack import Stack, running_stack

OUTPUT_TOKENS = 12
CHUNK_TOKENS = 64
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 130, 200, 500)
TENSOR = ("1", "2", "4")
SEEDED = {"temperature": 0.9, "seed": 11, "top_p": 0.95, "top_k": 50}
LOGPROB_ERROR = 1e-3

STEADY = {"lease_ms": "20000"}
PATIENT = {"connect_timeout_ms": "60000"}
"""Many processes share a few cores here, and a room that was given up for slowness would be a failure."""

TEXTS = (
    "Hello",
    "The capital of France is",
    "1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n: int) -> int:\n    a, b = 0, 1\n",
    "Привет, как дела? Сегодня",
    "今日はとても良い天気ですね。",
    "🎉🎈🥳 Party time! 🚀🌙",
    "Q: What is 12 times 12?\nA:",
    "The old lighthouse keeper climbed the stairs every evening, counting each step under his breath. " * 20,
)
SHAPES_ALWAYS = (("3", "1"),)
SHAPES = tuple(product(("1", "3"), ("1", "2", "3")))


@pytest.fixture(scope="module")
def small(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eight_heads(tmp_path_factory.mktemp("eight-heads"), demo_model_dir)


@pytest.fixture(scope="module")
def small_asked(small: Path) -> Asked:
    return asked(small, any_prompts(LENGTHS, VOCABULARY), OUTPUT_TOKENS)


@pytest.fixture(scope="class")
def every_tensor(small: Path) -> Iterator[Stack]:
    """The small model on 1, 2 and 4 tensor ranks a side. Four ranks hold copies of the two KV heads.

    Prefill workers hold 8,192 tokens each, decode workers 12,288, 4,096 and 8,192: placement goes by what is
    left, and equal ones would always be paired the same way."""
    prefill, decode = zip(TENSOR, (8, 4, 4), strict=True), zip(TENSOR, (12, 2, 4), strict=True)
    with running_stack(
        str(small),
        prefill=[
            {"tp": tensor, "kv_cache_memory": f"{size}MiB", "chunk_tokens": str(CHUNK_TOKENS)}
            for tensor, size in prefill
        ],
        decode=[{"tp": tensor, "kv_cache_memory": f"{size}MiB", **PATIENT} for tensor, size in decode],
        bootstrap=STEADY,
        dtype="float32",
    ) as stack:
        yield stack


@pytest.fixture
def mixed(small: Path) -> Iterator[Stack]:
    """Pages of 16 and of 32 tokens on both sides, a pipeline, and the contents of pages compared."""
    with running_stack(
        str(small),
        prefill=[
            {"tp": "2", "pp": "2", "page_tokens": "16", "chunk_tokens": str(CHUNK_TOKENS)},
            {"page_tokens": "32", "chunk_tokens": str(CHUNK_TOKENS)},
        ],
        decode=[
            {"page_tokens": "16", "kv_cache_memory": "8MiB", **PATIENT},
            {"tp": "4", "page_tokens": "32", "kv_cache_memory": "6MiB", **PATIENT},
        ],
        bootstrap=STEADY,
        dtype="float32",
        kv_checksum="pages",
        kv_cache_memory="8MiB",
    ) as stack:
        yield stack


def pairs_of(stack: Stack) -> set[Pair]:
    names = stack.services.keys()
    return set(
        product(
            (name for name in names if name.startswith("prefill")),
            (name for name in names if name.startswith("decode")),
        )
    )


async def check_greedy(stack: Stack, what: Asked, rounds_min: int) -> None:
    start = stack.idle_gauges()
    load = Load(stack, what)
    await load.rounds_until(pairs_of(stack), rounds_min)
    assert load.hung_up > 0
    stack.wait_idle(start)


class TestEveryTensor:
    """Its stack ends before the next one begins: each takes much memory."""

    @pytest.mark.timeout(600)
    async def test_greedy_output_equals_the_reference_over_every_pair_of_tensor_ranks(
        self, every_tensor: Stack, small_asked: Asked
    ) -> None:
        await check_greedy(every_tensor, small_asked, rounds_min=2)

    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("sampling", [{"temperature": 0}, SEEDED], ids=["greedy", "seeded"])
    async def test_draws_and_logprobs_are_the_same_on_every_pair(
        self, every_tensor: Stack, sampling: dict[str, Any]
    ) -> None:
        """One rank a side says what is right."""
        start = every_tensor.idle_gauges()
        drawn = await draws_by_pair(every_tensor, sampling)
        ids, logprobs = drawn["prefill-0", "decode-0"]
        assert len(ids) == OUTPUT_TOKENS
        for pair, (others, other_logprobs) in drawn.items():
            assert others == ids, pair
            assert other_logprobs == pytest.approx(logprobs, abs=LOGPROB_ERROR), pair
        every_tensor.wait_idle(start)


@pytest.mark.timeout(600)
async def test_greedy_output_equals_the_reference_over_differing_pages_with_their_contents_summed(
    mixed: Stack, small_asked: Asked
) -> None:
    await check_greedy(mixed, small_asked, rounds_min=2)
    rooms = web().get(f"{mixed.url}/rooms", params={"limit": 1000}, timeout=10).json()["rooms"]
    answered = {(room["prefill"], room["decode"]): room["id"] for room in rooms if room["cause"] is None}
    for pair in pairs_of(mixed):
        events = web().get(f"{mixed.url}/rooms/{answered[pair]}", timeout=10).json()["events"]
        landed = [each["detail"] for each in events if each["name"] == "landed"]
        assert landed, pair
        assert all(each.endswith("contents as computed") for each in landed), pair


@pytest.fixture(scope="module")
def demo_asked(demo_model_dir: Path) -> Asked:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    prompts = [list(tokenizer(text)["input_ids"]) for text in TEXTS]
    return asked(demo_model_dir, [[504], *prompts], OUTPUT_TOKENS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [
        pytest.param(*shape, marks=() if shape in SHAPES_ALWAYS else pytest.mark.all_groups)
        for shape in SHAPES
    ],
    ids=[f"prefill-tp{tensor}-pp{pipeline}" for tensor, pipeline in SHAPES],
)
async def test_greedy_output_of_the_demo_model_equals_the_reference_into_one_and_into_three_ranks(
    demo_model_dir: Path, demo_asked: Asked, tensor: str, pipeline: str
) -> None:
    """9 heads and 3 KV heads, 30 layers."""
    with running_stack(
        str(demo_model_dir),
        prefill=[{"tp": tensor, "pp": pipeline, "chunk_tokens": str(CHUNK_TOKENS)}],
        decode=[{"tp": "1", **PATIENT}, {"tp": "3", **PATIENT}],
        bootstrap=STEADY,
        dtype="float32",
        kv_cache_memory="64MiB",
    ) as stack:
        await check_greedy(stack, demo_asked, rounds_min=1)


async def draws_by_pair(stack: Stack, sampling: dict[str, Any]) -> dict[Pair, tuple[list[int], list[float]]]:
    """One request's tokens and their logprobs by every pair, asked again until each has served it."""
    found: dict[Pair, tuple[list[int], list[float]]] = {}
    async with httpx.AsyncClient(base_url=stack.url, timeout=ANSWER_S) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        [prompt] = any_prompts([150], VOCABULARY, seed=3)
        rng = random.Random(7)
        body = {"model": model, "prompt": prompt, "ignore_eos": True, "return_token_ids": True}
        body |= {"logprobs": 3, **sampling}

        async def one(tokens: int) -> None:
            """The more tokens it asks for, the fuller its pair is for the others."""
            reply = await client.post("/v1/completions", json=body | {"max_tokens": tokens})
            assert reply.status_code == 200, reply.text
            listed = await client.get("/rooms", params={"request_id": reply.headers["x-request-id"]})
            [room] = listed.json()["rooms"]
            choice = reply.json()["choices"][0]
            drawn = (
                choice["token_ids"][:OUTPUT_TOKENS],
                choice["logprobs"]["token_logprobs"][:OUTPUT_TOKENS],
            )
            ids, _ = found.setdefault((room["prefill"], room["decode"]), drawn)
            assert drawn[0] == ids

        for _ in range(20):
            asked_for = [rng.randrange(OUTPUT_TOKENS, 6 * OUTPUT_TOKENS) for _ in range(16)]
            await asyncio.gather(*map(one, asked_for))
            if pairs_of(stack) <= found.keys():
                return found
    raise AssertionError(f"{pairs_of(stack) - found.keys()} served no request")
