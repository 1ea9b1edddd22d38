"""Tests of greedy output with chunked prompts: equal to the reference library's."""

from pathlib import Path

import pytest

from tests.process.greedy import check_greedy
from tests.process.stack import Stack


@pytest.mark.timeout(600)
@pytest.mark.parametrize("at_a_time", [16], ids="{}-at-a-time".format)
async def test_greedy_output_equals_the_reference_in_chunks_of_64(
    stack: Stack, demo_model_dir: Path, at_a_time: int
) -> None:
    await check_greedy(stack, demo_model_dir, at_a_time)
