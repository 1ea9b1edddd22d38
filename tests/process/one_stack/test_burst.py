"""Test of a burst of requests: all are answered, and no room fails."""

import pytest

from tests.bench.commands import bench
from tests.process.stack import Stack


@pytest.mark.bench
def test_a_burst_and_a_flow_are_answered_and_nothing_fails(idle_stack: Stack) -> None:
    flow = ("--rate", "20", "--seconds", "2")
    requests = ("--prompt-tokens", "4", "--output-tokens", "2", "--sustained", "32")
    told = bench("burst", "--url", idle_stack.url, "--sizes", "400", *flow, *requests)
    loads = told["by_output_tokens"][0]["loads"]
    assert [each["answered"] for each in loads] == [400, 40], loads
    assert told["all_answered"], loads
    assert told["nothing_failed"], loads
