"""How does a run of pytest write down where its time went, and fail when a folder exceeds its budget?

Only `make test-all` fails by it. Where `CI` is set the same words are said and nothing fails: machines that
are shared with others' work are no ruler, and a folder that waits for them has not grown.
"""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.suite.budgets import complaints
from tests.suite.durations import Durations, Stopwatch, record_of, write, written_by
from tests.suite.order import is_worker
from tests.suite.tiers import ALL, REST, marks_of, part_of, parts_of

PART: Final = "part"
CHOICES: Final = {
    "keyword": "",
    "markexpr": "",
    "lf": False,
    "deselect": None,
    "all_groups": False,
    "all_models": False,
    "emulated": False,
    "collectonly": False,
}
"""What a whole run is given of pytest's choices among tests, by option."""


def is_whole(config: pytest.Config) -> bool:
    """All that its tier has, and nothing else."""
    chosen = [name for name, default in CHOICES.items() if config.getoption(name, default) != default]
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The report says which part its test is of, to whichever process takes the time."""
    report = yield
    report.user_properties.append((PART, part_of(marks_of(item))))
    return report


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """In the process that hears of all tests."""
    tier = config.getoption("--tier")
    if tier is not None and is_whole(config) and not is_worker(config):
        config.pluginmanager.register(Timing(tier, config.rootpath), "timing of this run")


class Timing:
    """Of one whole run."""

    def __init__(self, tier: str, root: Path) -> None:
        self._tier = tier
        self._root = root
        self._watch = Stopwatch()
        self._said: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Who has no part reports of a process that died."""
        part = dict(report.user_properties).get(PART, REST)
        self._watch.add(str(part), report.nodeid, report.duration)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        result = yield
        write(written_by(self._tier, self._root), self._watch.told(self._tier))
        if session.testsfailed:
            self._said.append("Budgets are not judged: a test that fails takes another time.")
        else:
            self._judge(session)
        return result

    def _judge(self, session: pytest.Session) -> None:
        parts = parts_of(session.config)
        budgets = Durations.read(record_of(self._root)).folders(parts)
        for folder, why in complaints(self._watch.durations().folders(parts), budgets):
            if self._tier == ALL and "CI" not in os.environ:
                session.config.hook.pytest_runtest_logreport(report=_failure(folder, why))
            else:
                self._said.append(f"OVER BUDGET {folder} {why}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("where the time went")
        terminalreporter.line(str(written_by(self._tier, Path())))
        for line in self._said:
            terminalreporter.line(line, red=True)


def _failure(folder: str, why: str) -> pytest.TestReport:
    """Of a folder, as of a test: the run fails by it, and its summary names it."""
    record = str(record_of(Path()))
    return pytest.TestReport(
        nodeid=f"{record}::{folder}",
        location=(record, None, folder),
        keywords={},
        outcome="failed",
        longrepr=f"{folder} {why}",
        when="call",
    )
