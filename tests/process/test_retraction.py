"""Tests of retraction, by what clients see: a decode worker's cache holds only a few of its answers.

Answers grow until no page is free, rooms are retracted and go on later, over and over: every answer is the
one that is drawn alone, nobody fails, also where processes are killed meanwhile, and at idle everything is
back where it was.
"""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.http import web
from tests.process.load import any_prompts
from tests.process.stack import Stack, running_stack
from tests.process.structured import tiny_model
from tests.support.shared import Shared

ANSWER_S: Final = 180.0
TOKENS: Final = 72
AT_ONCE: Final = 8
BETWEEN: Final = 4
"""Answers, and retractions, before and behind each kill."""
RETRACTIONS: Final = 6
ROUNDS_MAX: Final = 20
WAITING: Final = 12
"""Number of chats that come at once, of which a few fit."""
FAILED: Final = "baton_rooms_failed_total"
STOPPED: Final = 1
"""Index in ASKED of the request that ends with a stop string."""
CONTEXT: Final = 192
LOGPROB_ERROR: Final = 1e-3
PAGE_TOKENS: Final = 8
PAGES: Final = 32
PAGE_BYTES: Final = PAGE_TOKENS * 512
"""Bytes of a page of the tiny model: two layers, two heads of 16 numbers, 4 bytes each, keys and values."""
SEEDED: Final[dict[str, Any]] = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
NUMBERS: Final = {"type": "array", "items": {"type": "integer"}, "minItems": 9, "maxItems": 9}
ASKED: Final[list[dict[str, Any]]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "stop": "of its answer"},
    SEEDED | {"seed": 7, "logprobs": 2},
    SEEDED | {"seed": 11, "presence_penalty": 0.3, "min_tokens": 40},
    SEEDED | {"seed": 13, "n": 2, "max_tokens": TOKENS // 2, "logprobs": 0},
    {"temperature": 1, "seed": 17, "structured_outputs": {"json": NUMBERS}, "ignore_eos": False},
    {"temperature": 0},
    SEEDED | {"seed": 19},
]
LENGTHS: Final = (30, 37, 41, 48, 52, 33, 60, 45)
"""Lengths of the prompts, in tokens."""


@pytest.fixture(scope="module")
def model(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", demo_model_dir)


@pytest.fixture(scope="module")
def stacks(model: Path, request: pytest.FixtureRequest) -> Iterator[Shared[Stack]]:
    """A stack of one worker on each side. The parameter is the number of decode ranks. Deadlines are far
    shorter than a retracted room's wait."""
    ranks: int = request.param
    memory = PAGES * PAGE_BYTES // ranks
    with Shared(
        running_stack,
        str(model),
        prefill=[{"kv_cache_memory": "4MiB", "waiting_timeout_ms": "1000", "bootstrap_timeout_ms": "1000"}],
        decode=[
            {
                "tp": str(ranks),
                "page_tokens": str(PAGE_TOKENS),
                "kv_cache_memory": str(memory),
                "prealloc_timeout_ms": "1000",
                "transfer_timeout_ms": "1000",
            }
        ],
        bootstrap={"queue_timeout_ms": "180000", "context_length": str(CONTEXT)},
        context_length=str(CONTEXT),
        dtype="float32",
        group_timeout_ms="10000",
    ) as shared:
        yield shared


@pytest.fixture
def stack(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
    return stacks.lend(request.node)


NONE: Final[dict[str, Any]] = {"token_logprobs": []}


@dataclass(frozen=True)
class Answer:
    """Token ids of each choice."""

    ids: Sequence[Sequence[int]]
    texts: Sequence[str]
    finishes: Sequence[str]
    logprobs: Sequence[float]
    """Log-probabilities of all choices."""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        alike = (self.ids, self.texts, self.finishes) == (other.ids, other.texts, other.finishes)
        return alike and self.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_ERROR)


class Refused(Exception):
    """A side had no worker when the request came."""


@dataclass
class Asking:
    """Sender of each request of ASKED, always the same."""

    stack: Stack
    bodies: list[dict[str, Any]] = field(init=False)
    alone: list[Answer] = field(init=False)
    """Answers to each request sent alone."""

    def __post_init__(self) -> None:
        had = retractions(self.stack)
        model = web().get(f"{self.stack.url}/v1/models").json()["data"][0]["id"]
        common = {"model": model, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
        prompts = any_prompts(LENGTHS, 1_000)
        self.bodies = [
            common | {"prompt": prompt} | asked for prompt, asked in zip(prompts, ASKED, strict=True)
        ]
        for body in self.bodies:
            if "stop" in body:
                whole = self.ask({name: value for name, value in body.items() if name != "stop"}).texts[0]
                body["stop"] = whole[-len(whole) // 3 :][:8]
        self.alone = [self.ask(body) for body in self.bodies]
        assert retractions(self.stack) == had, "one alone fits"

    def ask(self, body: dict[str, Any]) -> Answer:
        """Raises Refused, and AssertionError for what fails."""
        reply = web().post(f"{self.stack.url}/v1/completions", json=body, timeout=ANSWER_S)
        if reply.status_code == 503 and reply.json()["error"]["code"] == "no_worker":
            raise Refused
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        return Answer(
            [choice["token_ids"] for choice in choices],
            [choice["text"] for choice in choices],
            [choice["finish_reason"] for choice in choices],
            [each for choice in choices for each in (choice["logprobs"] or NONE)["token_logprobs"]],
        )

    def together(self) -> None:
        """Send all requests at once, and check that each gets the answer that it gets alone."""
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = list(threads.map(self.ask, self.bodies))
        assert answers == self.alone

    @contextmanager
    def over_and_over(self) -> Iterator["Rounds"]:
        """Send requests from AT_ONCE clients until the block ends."""
        rounds = Rounds(self)
        threads = [threading.Thread(target=rounds.run, args=(place,)) for place in range(AT_ONCE)]
        for each in threads:
            each.start()
        try:
            yield rounds
        finally:
            rounds.leave.set()
            for each in threads:
                each.join(ANSWER_S)


@dataclass
class Rounds:
    asking: Asking
    answers: int = 0
    refused: int = 0
    """Number of requests that were refused while a side was away."""
    wrong: list[str] = field(default_factory=list)
    leave: threading.Event = field(default_factory=threading.Event)

    def run(self, place: int) -> None:
        body, alone = self.asking.bodies[place], self.asking.alone[place]
        while not self.leave.is_set():
            try:
                answer = self.asking.ask(body)
            except Refused:
                self.refused += 1
                time.sleep(0.1)
            except Exception as error:
                self.wrong.append(f"{place}: {error!r}")
            else:
                self.answers += 1
                if answer != alone:
                    self.wrong.append(f"{place}: {answer} for {alone}")

    def wait(self, answers: int, retracted: float) -> None:
        """Wait for this many further answers, and for this many retracted rooms in all."""
        stack = self.asking.stack
        wanted, deadline = self.answers + answers, time.monotonic() + ANSWER_S
        while self.answers < wanted or retractions(stack) < retracted:
            assert not self.wrong, self.wrong
            assert time.monotonic() < deadline, stack.tails()
            time.sleep(0.05)


def of_ranks(*ranks: int, more: Sequence[int] = ()) -> pytest.MarkDecorator:
    """`more`: in `make verify-groups` alone."""
    cases = [pytest.param(each, id=f"{each}-ranks") for each in ranks]
    cases += [pytest.param(each, id=f"{each}-ranks", marks=pytest.mark.all_groups) for each in more]
    return pytest.mark.parametrize("stacks", cases, indirect=True)


def retractions(stack: Stack) -> float:
    return stack.services["bootstrap"].total("baton_rooms_retracted_total")


def failed(stack: Stack) -> dict[str, float]:
    """Return the number of clients' rooms that failed, by reason."""
    samples = stack.services["bootstrap"].metrics().items()
    return {dict(labels)["reason"]: count for (name, labels), count in samples if name == FAILED and count}


@of_ranks(1)
def test_every_answer_is_the_one_that_is_drawn_alone_however_often_rooms_are_retracted(
    stacks: Shared[Stack], stack: Stack
) -> None:
    start = stack.idle_gauges()
    asking = stacks.once("asking", Asking)
    assert asking.alone[STOPPED].finishes == ["stop"]
    had, before = retractions(stack), failed(stack)
    for _ in range(ROUNDS_MAX):
        asking.together()
        if retractions(stack) >= had + RETRACTIONS:
            break
    assert retractions(stack) >= had + RETRACTIONS
    assert failed(stack) == before
    stack.wait_idle(start)


@of_ranks(1)
def test_nobody_fails_for_waiting(stacks: Shared[Stack], stack: Stack) -> None:
    """The chats give no length, and only two or three of them fit at once."""
    start, before = stack.idle_gauges(), failed(stack)
    model = stacks.once("asking", Asking).bodies[0]["model"]

    def chat(number: int) -> int:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"{number}: tell me a story."}],
            "ignore_eos": True,
            "seed": number,
        }
        reply = web().post(f"{stack.url}/v1/chat/completions", json=body, timeout=ANSWER_S)
        assert reply.status_code == 200, reply.text
        tokens: int = reply.json()["usage"]["completion_tokens"]
        return tokens

    with ThreadPoolExecutor(WAITING) as threads:
        lengths = list(threads.map(chat, range(WAITING)))
    assert min(lengths) > CONTEXT // 2
    assert failed(stack) == before
    stack.wait_idle(start)


@pytest.mark.timeout(300)
@of_ranks(1, more=[2])
def test_nothing_fails_where_a_process_of_either_side_is_killed_while_rooms_are_retracted(
    stacks: Shared[Stack], stack: Stack
) -> None:
    """One of two decode ranks is killed, and the other ends with it. Every answer is the same as alone,
    before the kills and after them."""
    start, asking = stack.idle_gauges(), stacks.once("asking", Asking)
    with asking.over_and_over() as rounds:
        for victim in ("decode-0", "prefill-0"):
            rounds.wait(BETWEEN, retractions(stack) + BETWEEN)
            kill_one_process(stack, victim)
        rounds.wait(BETWEEN, retractions(stack) + BETWEEN)
    assert not rounds.wrong, rounds.wrong
    assert failed(stack)
    stack.wait_idle(start)


def kill_one_process(stack: Stack, name: str) -> None:
    """Kill the last rank of a worker, and wait until the worker is back."""
    ranks = stack.services[name].ranks()
    stack.forget(name)
    ranks[-1].send(signal.SIGKILL)
    if len(ranks) == 1:  # who starts several ranks starts them again
        stack.services[name].process.wait(ANSWER_S)
        stack.restart(name)
    stack.wait_ready(2)
