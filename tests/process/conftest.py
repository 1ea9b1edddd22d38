"""Small stacks of real processes for the tests that leave them as they found them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.stack import Stack, running_stack


@pytest.fixture(scope="module")
def stack(demo_model_dir: Path) -> Iterator[Stack]:
    """One prefill and one decode worker, fp32, chunks of 64 tokens so that prompts take several. 5 GB while
    it runs: one for a whole session would be there twice while files run side by side."""
    with running_stack(
        str(demo_model_dir), prefill=[{"chunk_tokens": "64"}], dtype="float32", kv_cache_memory="192MiB"
    ) as running:
        yield running


@pytest.fixture
def idle_stack(stack: Stack) -> Iterator[Stack]:
    """The shared stack; afterwards every gauge is back where it was (`zero-at-idle`)."""
    start = stack.idle_gauges()
    yield stack
    stack.wait_idle(start)


@pytest.fixture(scope="module")
def stack_small(demo_model_dir: Path) -> Iterator[Stack]:
    """Caches that hold 5,824 tokens: less than the model's context."""
    with running_stack(str(demo_model_dir), dtype="float32", kv_cache_memory="128MiB") as running:
        yield running
