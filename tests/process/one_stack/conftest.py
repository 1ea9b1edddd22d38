"""One small stack of real processes, for all the tests of this folder: each leaves it as it found it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.process.stack import SPLIT, Stack, running_stack
from tests.support.shared import Shared


@pytest.fixture(scope="package")
def stacks(demo_model_dir: Path) -> Iterator[Shared[Stack]]:
    """A stack of one prefill and one decode worker in fp32. Chunks of 64 tokens make prompts take several,
    and caches of 4,368 tokens are smaller than the model's context. Prefill computes all prompts. The stack
    takes 5 GB, so it ends with its folder's tests."""
    with Shared(
        running_stack,
        str(demo_model_dir),
        prefill=[{"chunk_tokens": "64"}],
        decode=[SPLIT],
        dtype="float32",
        kv_cache_memory="192MiB",
    ) as shared:
        yield shared


@pytest.fixture
def stack(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
    return stacks.lend(request.node)


@pytest.fixture
def idle_stack(stack: Stack) -> Iterator[Stack]:
    """The shared stack; afterwards every gauge is back where it was (`zero-at-idle`)."""
    start = stack.idle_gauges()
    yield stack
    stack.wait_idle(start)


@pytest.fixture
def client(idle_stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{idle_stack.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id
