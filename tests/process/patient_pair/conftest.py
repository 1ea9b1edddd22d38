"""One pair of workers for all the tests of this folder. Requests wait long for a worker to come back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.stack import Stack, running_stack
from tests.support.shared import Shared


@pytest.fixture(scope="package")
def stacks(demo_model_dir: Path) -> Iterator[Shared[Stack]]:
    with Shared(
        running_stack,
        str(demo_model_dir),
        prefill=[{"chunk_tokens": "512"}],
        bootstrap={"retry_wait_ms": "100000"},
        dtype="float32",
        kv_cache_memory="192MiB",
    ) as shared:
        yield shared


@pytest.fixture
def patient(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
    return stacks.lend(request.node)
