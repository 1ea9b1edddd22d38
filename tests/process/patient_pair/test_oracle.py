"""Tests of greedy output in chunks of the default length: equal to the reference library's."""

from pathlib import Path

import pytest

from tests.process.greedy import check_greedy
from tests.process.stack import Stack


@pytest.mark.timeout(600)
async def test_greedy_output_equals_the_reference_in_chunks_of_512(
    patient: Stack, demo_model_dir: Path
) -> None:
    await check_greedy(patient, demo_model_dir, at_a_time=4)
