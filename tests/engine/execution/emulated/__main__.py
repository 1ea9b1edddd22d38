"""Tests of the kernels for other CPUs, in emulation: equal results, no access outside tensors, no compiler
warning. Faults put into their source must be found, too. Prints one JSON object on stdout and pytest's output
on stderr. The exit status is 1 if a test fails.

    python -m tests.engine.execution.emulated
"""

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import pytest

TESTS: Final = str(Path(__file__).parents[1])
CHOSEN: Final = ("-q", "-p", "no:cacheprovider", "--durations=9", "--emulated", "-m", "emulated")
FAULT: Final = "test_a_fault_in_the_source_is_seen"


class Outcomes:
    """Records the outcome of each test."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.skipped: list[str] = []
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-2000:]
        elif report.skipped:
            self.skipped.append(report.nodeid)
        elif report.when == "call":
            self.passed.append(report.nodeid)

    def told(self) -> dict[str, Any]:
        faults = [each for each in self.passed if FAULT in each]
        return {
            "passed": len(self.passed),
            "faults_seen": sum("-none]" not in each for each in faults),
            "skipped": len(self.skipped),
            "failed": self.failed,
        }


def main() -> int:
    outcomes = Outcomes()
    with redirect_stdout(sys.stderr):
        status = pytest.main(
            ["-q", "-p", "no:cacheprovider", "--emulated", "-m", "emulated", TESTS], [outcomes]
        )
    sys.stdout.write(json.dumps(outcomes.told()) + "\n")
    return int(status != pytest.ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
