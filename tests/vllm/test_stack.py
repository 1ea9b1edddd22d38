"""Tests of a whole stack whose workers compute on vLLM, over gRPC and NIXL, against vLLM's own `LLM`."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.process.stack import SPLIT, Stack, running_stack
from tests.vllm.completions import TOKENS, Restart, answer, complete, stream
from tests.vllm.conftest import PAGE_TOKENS
from tests.vllm.oracle import vllm_greedy

pytestmark = pytest.mark.stack

LENGTHS = (5, 31, 32, 100, 333, 700, 1_100, 1_476)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def long_prompts() -> list[list[int]]:
    numbers = random.Random(5)
    return [[numbers.randrange(10, 40_000) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def answers(
    demo_model_dir: Path, long_prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """Greedy answers of vLLM's own `LLM`, which ends before the stack starts."""
    return vllm_greedy(demo_model_dir, long_prompts, TOKENS, tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def stack(answers: list[list[int]]) -> Iterator[Stack]:
    """One worker of each side. Decode checks drafts, which change no answer."""
    assert answers
    with running_stack(
        "demo",
        by_commands=True,
        engine="vllm",
        dtype="float32",
        page_tokens=str(PAGE_TOKENS),
        kv_cache_memory="320MiB",
        decode=({**SPLIT, "speculate": "ngram:3"},),
    ) as stack:
        yield stack


@pytest.mark.parametrize("width", [1, 4, 16])
def test_answers_equal_vllm_alone(
    client: httpx.Client, long_prompts: list[list[int]], answers: list[list[int]], width: int
) -> None:
    times = max(1, width // len(long_prompts))
    with ThreadPoolExecutor(width) as threads:
        found = threads.map(lambda each: answer(client, each), long_prompts * times)
        assert list(found) == answers * times


def test_choices(client: httpx.Client) -> None:
    drawn = {"temperature": 1.0, "seed": 3}
    four = complete(client, "Tell me of Paris", n=4, **drawn)
    assert len({str(each["token_ids"]) for each in four}) == 4
    assert four[0]["token_ids"] == complete(client, "Tell me of Paris", **drawn)[0]["token_ids"]


def test_echo_with_scores(client: httpx.Client) -> None:
    [choice] = complete(client, "The capital of France is", echo=True, logprobs=1, max_tokens=3)
    scores = choice["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert len(scores) == 8
    assert all(each < 0 for each in scores[1:])


def test_prompt_scores(client: httpx.Client, long_prompts: list[list[int]]) -> None:
    [choice] = complete(client, long_prompts[3], prompt_logprobs=0)
    assert len(choice["prompt_logprobs"]) == len(long_prompts[3])


def test_structured_output(client: httpx.Client) -> None:
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "John is 25. Answer in JSON."}],
        "max_tokens": 60,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    }
    reply = client.post("/v1/chat/completions", json=body).json()
    assert json.loads(reply["choices"][0]["message"]["content"]).keys() == {"name", "age"}


def test_drafts_are_taken(client: httpx.Client, stack: Stack) -> None:
    repeated = "one two three four five six seven eight nine ten " * 6
    before = drafts(stack)["taken"]
    complete(client, repeated, max_tokens=40)
    assert drafts(stack)["taken"] > before


def drafts(stack: Stack) -> Counter[str]:
    """Return the number of drafts that decode checked, by outcome."""
    found: Counter[str] = Counter()
    for (name, labels), value in stack.services["decode-0"].metrics().items():
        if name == "baton_decode_draft_tokens_total":
            found[dict(labels)["outcome"]] += int(value)
    return found


def test_decode_is_killed_in_mid_stream(client: httpx.Client, stack: Stack) -> None:
    """Seeded streams go on, token for token, on the restarted worker."""
    numbers = range(4)
    undisturbed = [story(client, each) for each in numbers]
    kill = Restart(stack, "decode-0")
    with ThreadPoolExecutor(len(numbers)) as threads:
        assert list(threads.map(lambda each: story(client, each, kill), numbers)) == undisturbed
    assert kill.was_made
    stack.wait_ready()


def story(client: httpx.Client, number: int, on_tokens: Callable[[], None] | None = None) -> list[int]:
    """Return the ids of a streamed answer. `on_tokens`: called once it has a few."""
    prompt = f"Story number {number}: once upon a time"
    return stream(client, prompt, on_tokens, max_tokens=60, temperature=1.0, seed=number)
