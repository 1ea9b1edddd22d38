"""An engine on vLLM that the tests of a session share, and what vLLM answers alone."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.decode.settings import DecodeSettings
from tests.process.stack import Stack
from tests.vllm.completions import CALL_S
from tests.vllm.driving import Driver
from tests.vllm.oracle import vllm_greedy

PAGE_TOKENS = 32
TOKENS = 12
LENGTHS = (1, 5, 31, 32, 33, 64, 150, 400)


def settings(model: str, **changes: Any) -> DecodeSettings:
    """Return the settings of an engine on vLLM in float32."""
    given: dict[str, Any] = {
        "dtype": "float32",
        "page_tokens": PAGE_TOKENS,
        "kv_cache_memory": 256 << 20,
    } | changes
    return DecodeSettings(model=model, **given)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    numbers = random.Random(1)
    return [[numbers.randrange(10, 40_000) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="session")
def alone(
    demo_model_dir: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """Greedy answers of vLLM's own `LLM` to each prompt."""
    return vllm_greedy(demo_model_dir, prompts, TOKENS, tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="session")
def engine() -> Any:
    from baton.vllm.engine_startup import start_rank

    return start_rank(settings("demo"), 1)


@pytest.fixture
def driver(engine: Any) -> Driver:
    return Driver(engine)


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    """A client of the test module's stack, in which nothing is left behind the test."""
    start = stack.idle_gauges()
    with httpx.Client(base_url=stack.url, timeout=CALL_S) as client:
        yield client
    stack.wait_idle(start)
