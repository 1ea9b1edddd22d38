"""Tests of stopping a stack: every process ends with exit code 0, workers first."""

from tests.process.stack import Stack
from tests.support.shared import Shared


def test_workers_drain_and_exit_zero(stacks: Shared[Stack], breakable: Stack) -> None:
    codes = breakable.stop()
    assert codes == {"prefill-0": 0, "decode-0": 0, "bootstrap": 0}, breakable.tails()
    stacks.retire()
