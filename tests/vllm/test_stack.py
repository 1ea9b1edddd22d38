"""Tests of a whole stack whose workers compute on vLLM, over gRPC and NIXL, against vLLM's own `LLM`."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
import pytest

from tests.process.stack import SPLIT, Stack, running_stack
from tests.vllm.conftest import PAGE_TOKENS
from tests.vllm.oracle import vllm_greedy

pytestmark = pytest.mark.stack

TOKENS = 24
LENGTHS = (5, 31, 32, 100, 333, 700, 1_100, 1_476)
CALL_S = 300.0
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
    """What vLLM's own `LLM` answers. It ends before the stack starts."""
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


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    """A client of the stack, in which nothing is left behind the test."""
    start = stack.idle_gauges()
    with httpx.Client(base_url=stack.url, timeout=CALL_S) as client:
        yield client
    stack.wait_idle(start)


def complete(client: httpx.Client, prompt: Sequence[int] | str, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True} | fields
    reply = client.post("/v1/completions", json={"model": "SmolLM2-135M-Instruct", **body})
    assert reply.status_code == 200, reply.text
    choices: list[dict[str, Any]] = reply.json()["choices"]
    return choices


@pytest.mark.parametrize("width", [1, 4, 16])
def test_answers_equal_vllm_alone(
    client: httpx.Client, long_prompts: list[list[int]], answers: list[list[int]], width: int
) -> None:
    def ask(prompt: list[int]) -> list[int]:
        [choice] = complete(client, prompt, ignore_eos=True)
        ids: list[int] = choice["token_ids"]
        return ids

    times = max(1, width // len(long_prompts))
    with ThreadPoolExecutor(width) as threads:
        assert list(threads.map(ask, long_prompts * times)) == answers * times


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
    complete(client, repeated, max_tokens=40)
    assert stack.services["decode-0"].total("baton_decode_draft_tokens_total") > 0


def test_decode_is_killed_in_mid_stream(client: httpx.Client, stack: Stack) -> None:
    """Streams that are drawn with seeds go on, token for token, on the worker that is started anew."""
    numbers = range(4)
    undisturbed = [stream(client, each) for each in numbers]
    lock = Lock()
    killed: list[bool] = []

    def kill() -> None:
        with lock:
            if not killed:
                killed.append(True)
                stack.services["decode-0"].kill()
                stack.restart("decode-0")

    with ThreadPoolExecutor(len(numbers)) as threads:
        assert list(threads.map(lambda each: stream(client, each, kill), numbers)) == undisturbed
    assert killed
    stack.wait_ready()


def stream(client: httpx.Client, number: int, on_tokens: Callable[[], None] | None = None) -> list[int]:
    """Return the ids of a streamed answer. `on_tokens`: called once it has a few."""
    body = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": f"Story number {number}: once upon a time",
        "max_tokens": 60,
        "temperature": 1.0,
        "seed": number,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    ids: list[int] = []
    with client.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    ids += choice.get("token_ids") or []
            if on_tokens is not None and len(ids) >= 10:
                on_tokens()
                on_tokens = None
    return ids
