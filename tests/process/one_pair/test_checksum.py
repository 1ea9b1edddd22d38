"""Tests of --kv-checksum: answers are the reference library's, and a peer without checksums is refused."""

import time
from pathlib import Path

import pytest

from tests.http import web
from tests.oracle import reference_behind
from tests.process.greedy import OUTPUT_TOKENS, complete_all
from tests.process.stack import Stack

PROMPTS = [[*range(1000, 1000 + length)] for length in (1, 15, 16, 17, 64, 130, 700)]
REFUSED_S = 60.0


@pytest.mark.timeout(600)
async def test_greedy_output_equals_the_reference_with_pages_summed(
    breakable: Stack, demo_model_dir: Path
) -> None:
    failed = breakable.services["decode-0"].total("baton_rooms_failed_total")
    start = breakable.idle_gauges()
    answers = await complete_all(breakable.url, PROMPTS, at_a_time=4)
    assert answers == reference_behind(demo_model_dir, PROMPTS, answers, OUTPUT_TOKENS)
    breakable.wait_idle(start)
    rooms = web().get(f"{breakable.url}/rooms", timeout=10).json()["rooms"]
    timeline = web().get(f"{breakable.url}/rooms/{rooms[0]['id']}", timeout=10).json()["events"]
    [landed] = [each["detail"] for each in timeline if each["name"] == "landed"]
    assert landed.endswith("contents as computed")
    assert breakable.services["decode-0"].total("baton_rooms_failed_total") == failed


@pytest.mark.timeout(600)
def test_schema_agreed_a_worker_that_sums_no_pages_is_refused_by_name(breakable: Stack) -> None:
    odd = breakable.start_worker("decode", "decode-odd", kv_checksum="record")
    try:
        deadline = time.monotonic() + REFUSED_S
        said = "kv_checksum differs: this stack has pages, the worker has record"
        while said not in odd.tail(200):
            assert time.monotonic() < deadline, odd.tail()
            time.sleep(0.1)
        assert web().get(f"{breakable.url}/ready", timeout=10).status_code == 200
    finally:
        del breakable.services["decode-odd"]
        odd.kill()
