"""Tests of disturbances on vLLM's engine: answers are those of undisturbed ones, and nothing is left at idle.

Rooms are retracted, clients hang up, and the prefill worker is killed, or stopped until decode revokes its
access to pages. Pages are checked by their contents on each hand-over.
"""

import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.process.stack import SPLIT, Stack, running_stack
from tests.vllm.completions import Restart, stream
from tests.vllm.families import save_family

pytestmark = pytest.mark.stack

PAGES: Final = {"qwen3_moe": (32, 65_536), "deepseek_v3": (16, 110_592)}
"""Tokens and bytes of a page, by family."""
HERE: Final = {"deepseek_v3"}
"""Families of each run. The others are run with `--all-models`."""
MEMORY_TOKENS: Final = 640
"""Tokens that decode's memory holds: less than those of all requests that run at a time."""
AT_A_TIME: Final = 6
TOKENS: Final = 100
SHORT, LONG = 60, 480
CHUNK: Final = 8
"""Tokens of a prompt that prefill computes in one step: so few that a long prompt can be disturbed."""
WAIT_S: Final = 120.0
TRIES: Final = 20


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each in HERE else pytest.mark.all_models) for each in PAGES],
)
def stack(
    request: pytest.FixtureRequest, demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    size, page = PAGES[request.param]
    model = save_family(request.param, tmp_path_factory.mktemp("families"), demo_model_dir)
    decode = {"kv_cache_memory": str((MEMORY_TOKENS // size + 1) * page), "revoke_after_ms": "1000", **SPLIT}
    with running_stack(
        str(model),
        by_commands=True,
        engine="vllm",
        dtype="float32",
        page_tokens=str(size),
        context_length="600",
        kv_checksum="pages",
        prefix_cache="false",  # each prompt is to be computed and handed over
        bootstrap={"context_length": "600"},
        prefill=[{"chunk_tokens": str(CHUNK), "kv_cache_memory": "64MiB"}],
        decode=[decode],
    ) as stack:
        yield stack


def draw(
    client: httpx.Client, number: int, length: int = SHORT, on_tokens: Callable[[], None] | None = None
) -> list[int]:
    """Return the ids of request `number`, whose prompt has `length` tokens, drawn with a seed."""
    numbers = random.Random(number)
    prompt = [numbers.randrange(10, 40_000) for _ in range(length)]
    return stream(client, prompt, on_tokens, temperature=1.0, seed=number, max_tokens=TOKENS)


@contextmanager
def long_prompt_begun(stack: Stack, client: httpx.Client) -> Iterator[Future[list[int]]]:
    """Context of a request with a long prompt, which prefill has begun to compute, and which ends with it."""
    prefill = stack.services["prefill-0"]
    before = prefill.total("baton_prefill_tokens_total")
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(draw, client, 0, LONG)
        stack.wait_until(lambda: prefill.total("baton_prefill_tokens_total") > before, WAIT_S)
        yield answer


def pages(stack: Stack, state: str) -> float:
    """Return the number of decode's pages in a state."""
    return stack.services["decode-0"].gauges()["baton_kv_pages", (("state", state),)]


def test_retracted_rooms_go_on(stack: Stack, client: httpx.Client) -> None:
    undisturbed = [draw(client, number) for number in range(AT_A_TIME)]
    retracted = stack.services["decode-0"].total("baton_decode_rooms_retracted_total")
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        assert list(threads.map(lambda each: draw(client, each), range(AT_A_TIME))) == undisturbed
    assert stack.services["decode-0"].total("baton_decode_rooms_retracted_total") > retracted


def test_clients_that_hang_up_leave_nothing(stack: Stack, client: httpx.Client) -> None:
    """Before the first token, and behind some, beside a request that goes on."""

    class HungUp(Exception):
        pass

    def hang_up() -> None:
        raise HungUp

    undisturbed = draw(client, 1)
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        goes_on = threads.submit(draw, client, 1)
        others = [threads.submit(draw, client, number, SHORT, hang_up) for number in range(2, 5)]
        with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=stack.url, timeout=0.2) as hasty:
            draw(hasty, 0, LONG)
        assert {type(each.exception()) for each in others} == {HungUp}
        assert goes_on.result() == undisturbed


def test_a_request_goes_on_when_prefill_is_killed(stack: Stack, client: httpx.Client) -> None:
    undisturbed = draw(client, 0, LONG)
    with long_prompt_begun(stack, client) as answer:
        Restart(stack, "prefill-0")()
        assert answer.result() == undisturbed
    stack.wait_ready()


def test_pages_are_revoked_when_prefill_stands_still(stack: Stack, client: httpx.Client) -> None:
    undisturbed = draw(client, 0, LONG)
    decode, prefill = stack.services["decode-0"], stack.services["prefill-0"].process
    revoked = decode.total("baton_kv_revocations_total")
    for _ in range(TRIES):
        with long_prompt_begun(stack, client) as answer:
            prefill.send_signal(signal.SIGSTOP)
            try:
                if pages(stack, "exposed") == 0:  # the hand-over has ended
                    continue
                stack.wait_until(lambda: decode.total("baton_kv_revocations_total") > revoked, WAIT_S)
                stack.wait_until(lambda: pages(stack, "quarantined") == 0, WAIT_S)
                assert answer.result() == undisturbed
            finally:
                prefill.send_signal(signal.SIGCONT)
        break
    assert decode.total("baton_kv_revocations_total") > revoked
    stack.wait_ready()
    stack.wait_until(lambda: prefills_again(stack, client, undisturbed), WAIT_S)


def prefills_again(stack: Stack, client: httpx.Client, undisturbed: Any) -> bool:
    """Return whether prefill had the prompt of an answer, which is right."""
    before = stack.services["prefill-0"].total("baton_prefill_tokens_total")
    assert draw(client, 0, LONG) == undisturbed
    return stack.services["prefill-0"].total("baton_prefill_tokens_total") > before
