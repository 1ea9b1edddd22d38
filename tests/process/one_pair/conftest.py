"""One pair of workers of real processes, which may be killed, for all the tests of this folder.

The contents of pages are summed, prompts take several chunks, caches hold 2,912 tokens, nobody waits long for
a worker to come back, and leases are as short as a user's. Decode computes no prompt while prefill is there.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.process.stack import SPLIT, Stack, running_stack
from tests.support.shared import Shared

LEASE_MS: Final = 3_000


@pytest.fixture(scope="package")
def stacks(demo_model_dir: Path) -> Iterator[Shared[Stack]]:
    with Shared(
        running_stack,
        str(demo_model_dir),
        prefill=[{"chunk_tokens": "64"}],
        decode=[SPLIT],
        bootstrap={"retry_wait_ms": "200", "lease_ms": str(LEASE_MS)},
        dtype="float32",
        kv_cache_memory="128MiB",
        kv_checksum="pages",
    ) as shared:
        yield shared


@pytest.fixture
def breakable(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
    return stacks.lend(request.node)
