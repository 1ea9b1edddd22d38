"""Tests of failover: a stream goes on, token for token, when its decode or prefill worker is killed."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.execution.compiled_kernels import PLAIN, known
from tests.http import web
from tests.oracle import reference_behind, reference_greedy, reference_scores
from tests.process.stack import SPLIT, Stack, running_stack
from tests.support.shared import Shared

ANSWER_S = 120.0
OUTPUT_TOKENS = 60
KILL_AT = 15
MESSAGES = [{"role": "user", "content": "Once upon a time, in a village by the sea,"}]
LONG = 1_500
LOGPROB_ERROR = 0.0 if known(PLAIN) else 1e-3
"""Tolerance of log-probabilities drawn behind a prompt and part of its answer. 0 if a step is one call."""
SEEDED = {
    "temperature": 0.9,
    "seed": 7,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "min_tokens": 40,
}

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
NUMBERS = {"type": "array", "items": NUMBER, "minItems": 14, "maxItems": 14}
HELD = {"temperature": 1.0, "seed": 11, "guided_json": NUMBERS}
"""Request for an answer whose form depends on the position, so that one begun anew in another room would have
another end."""


@pytest.fixture(scope="module")
def stacks(demo_model_dir: Path) -> Iterator[Shared[Stack]]:
    """A stack of two pairs. Prompts are computed in chunks of 64 tokens, so that a long one takes some
    time."""
    with Shared(
        running_stack,
        str(demo_model_dir),
        prefill=[{"chunk_tokens": "64"}] * 2,
        decode=[SPLIT] * 2,
        dtype="float32",
        kv_cache_memory="128MiB",
    ) as shared:
        yield shared


@pytest.fixture
def pairs(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
    return stacks.lend(request.node)


@dataclass
class Streamed:
    """One streamed chat as its client received it."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    roles: int = 0
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    request_id: str = ""
    done: bool = False


def model_of(stack: Stack) -> str:
    name: str = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    return name


def chat(stack: Stack, on_tokens: Callable[[str, int], None] = lambda *_: None, **more: Any) -> Streamed:
    """Stream a chat; `on_tokens(request_id, count)` after each chunk that has any."""
    seen = Streamed()
    body = {
        "model": model_of(stack),
        "messages": MESSAGES,
        "max_tokens": OUTPUT_TOKENS,
        "logprobs": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    with web().stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=ANSWER_S) as reply:
        seen.request_id = reply.headers["x-request-id"]
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                seen.done = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                seen.usage = chunk.get("usage") or seen.usage
                for choice in chunk["choices"]:
                    seen.roles += "role" in choice["delta"]
                    seen.text += choice["delta"].get("content") or ""
                    seen.ids += choice.get("token_ids", [])
                    seen.logprobs += [
                        each["logprob"] for each in (choice["logprobs"] or {"content": []})["content"]
                    ]
                    seen.finish = choice["finish_reason"] or seen.finish
                on_tokens(seen.request_id, len(seen.ids))
    return seen


def rooms_of(stack: Stack, request_id: str) -> list[dict[str, Any]]:
    """Return a request's rooms, oldest first."""
    listed = web().get(f"{stack.url}/rooms", params={"request_id": request_id}).json()["rooms"]
    return list(reversed(listed))


class Killer:
    """Kills the worker of one side that serves a request, once, after a given number of tokens."""

    def __init__(self, stack: Stack, side: str) -> None:
        self._stack = stack
        self._side = side
        self.victim = ""

    def __call__(self, request_id: str, count: int) -> None:
        if count >= KILL_AT and not self.victim:
            self.victim = rooms_of(self._stack, request_id)[0][self._side]
            self._stack.services[self.victim].kill()


@pytest.mark.parametrize("more", [{"temperature": 0}, SEEDED, HELD], ids=["greedy", "seeded", "held"])
def test_a_decode_worker_killed_in_mid_stream_is_not_noticed(
    pairs: Stack, demo_model_dir: Path, more: dict[str, Any]
) -> None:
    """The client gets the same stream as without the kill. Greedily, it is what the reference library
    draws."""
    start = pairs.idle_gauges()
    unbroken = chat(pairs, **more)
    if more["temperature"] == 0:
        chat_body = {"model": model_of(pairs), "messages": MESSAGES}
        prompt = web().post(f"{pairs.url}/tokenize", json=chat_body).json()["tokens"]
        assert [unbroken.ids] == reference_greedy(demo_model_dir, [prompt], OUTPUT_TOKENS, "float32")
    if more is HELD:
        assert len(json.loads(unbroken.text)) == 14
    killer = Killer(pairs, "decode")
    broken = chat(pairs, killer, **more)
    assert killer.victim
    assert broken.done
    assert broken.roles == 1
    assert (broken.text, broken.ids) == (unbroken.text, unbroken.ids)
    assert (broken.finish, counts(broken.usage)) == (unbroken.finish, counts(unbroken.usage))
    assert broken.logprobs == pytest.approx(unbroken.logprobs, abs=LOGPROB_ERROR, rel=0)
    old, new = rooms_of(pairs, broken.request_id)
    assert new["retry_of"] == old["id"]
    assert old["cause"]["reason"] == "decode_lost"
    assert new["decode"] != old["decode"]
    pairs.restart(killer.victim)
    pairs.wait_ready(4)
    pairs.wait_idle(start)


CHOICES = 4


def several(stack: Stack, on_tokens: Callable[[str, int], None] = lambda *_: None, **more: Any) -> list[Any]:
    """Return each choice's token ids and finish reason of a streamed completion, and the usage."""
    body = {
        "model": model_of(stack),
        "prompt": "Once upon a time, in a village by the sea,",
        "temperature": 1.0,
        "max_tokens": 24,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    ids: list[list[int]] = [[] for _ in range(body.get("n", 1))]
    finishes: list[str | None] = [None] * len(ids)
    usage: dict[str, Any] = {}
    with web().stream("POST", f"{stack.url}/v1/completions", json=body, timeout=ANSWER_S) as reply:
        request_id = reply.headers["x-request-id"]
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    place = choice["index"]
                    assert finishes[place] is None
                    ids[place] += choice.get("token_ids", [])
                    finishes[place] = choice["finish_reason"]
                on_tokens(request_id, sum(map(len, ids)))
    assert None not in finishes
    return [ids, finishes, counts(usage), request_id]


def test_a_decode_worker_killed_while_it_draws_several_choices_is_not_noticed(pairs: Stack) -> None:
    """Choices that differ go on in rooms of their own. Each gets the tokens of a request with its seed."""
    start = pairs.idle_gauges()
    *unbroken, _ = several(pairs, n=CHOICES, seed=21)
    killer = Killer(pairs, "decode")
    *broken, request_id = several(pairs, killer, n=CHOICES, seed=21)
    assert killer.victim
    assert broken == unbroken
    *new, old = reversed(rooms_of(pairs, request_id))
    assert (old["choices"], old["cause"]["reason"]) == (CHOICES, "decode_lost")
    assert sum(room["choices"] for room in new) == CHOICES
    assert len(new) > 1
    assert {room["retry_of"] for room in new} == {old["id"]}
    for place in range(CHOICES):
        alone, *_ = several(pairs, seed=21 + place)
        assert alone == [unbroken[0][place]]
    pairs.restart(killer.victim)
    pairs.wait_ready(4)
    pairs.wait_idle(start)


def counts(usage: Any) -> dict[str, Any]:
    """Return the usage without cached tokens, since the second of two equal prompts may find the first one's
    pages."""
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


def test_a_prefill_worker_killed_while_it_computes_is_not_noticed(pairs: Stack, demo_model_dir: Path) -> None:
    """The client's prompt logprobs are whole, too, since the next worker scores the prompt anew."""
    start = pairs.idle_gauges()
    prompt = [(7 * place) % 1_000 for place in range(LONG)]
    body = {
        "model": model_of(pairs),
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
        "echo": True,
        "logprobs": 0,
    }
    headers = {"X-Request-Id": "killed-prefill"}
    replies: list[httpx.Response] = []

    def ask() -> None:
        url = f"{pairs.url}/v1/completions"
        replies.append(web().post(url, json=body, headers=headers, timeout=ANSWER_S))

    workers = [pairs.services[name] for name in ("prefill-0", "prefill-1")]
    before = [each.total("baton_prefill_tokens_total") for each in workers]
    asker = threading.Thread(target=ask)
    asker.start()
    victim = None
    while victim is None:
        assert asker.is_alive(), replies[0].text
        for each, earlier in zip(workers, before, strict=True):
            if 0 < each.total("baton_prefill_tokens_total") - earlier < LONG:
                victim = each
    victim.kill()
    asker.join(ANSWER_S)
    assert replies[0].status_code == 200, replies[0].text
    (choice,) = replies[0].json()["choices"]
    answers = [choice["token_ids"]]
    assert answers == reference_behind(demo_model_dir, [prompt], answers, 8)
    told, reference = choice["logprobs"]["token_logprobs"], reference_scores(demo_model_dir, prompt)
    own = [float(row[token]) for row, token in zip(reference, prompt[1:], strict=True)]
    assert told[0] is None
    assert told[1:LONG] == pytest.approx(own, abs=1e-3)
    assert len(told) == LONG + 8
    old, new = rooms_of(pairs, "killed-prefill")
    assert (old["prefill"], old["cause"]["reason"]) == (victim.name, "prefill_lost")
    assert new["prefill"] != victim.name
    assert new["retry_of"] == old["id"]
    pairs.restart(victim.name)
    pairs.wait_ready(4)
    pairs.wait_idle(start)
