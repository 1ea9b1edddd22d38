"""In which order are the test files handed to processes that run them side by side?

The longest first: what is handed out last is short, and no process ends long before the others.
"""

import math
import os
from typing import Any, Final

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.suite.durations import Durations, record_of
from tests.suite.tiers import parts_of

TOGETHER: Final = (
    "tests/process/one_pair/",
    "tests/process/one_stack/",
    "tests/process/patient_pair/",
    "tests/ui/",
)
"""Folders whose tests share what takes long to start: one process runs all of each."""


def unit_of(nodeid: str) -> str:
    """What is handed out at once: a test's file, or its folder."""
    file = nodeid.split("::", 1)[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests that another one hands out."""
    return "PYTEST_XDIST_WORKER" in os.environ


class _ByUnit(LoadFileScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """With `--dist loadfile`. The units go out in the order in which they were collected."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return _ByUnit(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file that is not recorded yet comes first."""
    if is_worker(config):
        seconds = Durations.read(record_of(config.rootpath)).of(parts_of(config), unit_of)
        items.sort(key=lambda item: -seconds.get(unit_of(item.nodeid), math.inf))
