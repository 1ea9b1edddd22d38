"""Options that several kinds of tests share."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from baton.models.model_files import DEMO, prepare, resolve

if TYPE_CHECKING:
    from tests.grammars.answers import Slow

# The same examples in every run; what failed is printed as a blob that replays it. Many and others:
# pytest --hypothesis-profile=search
settings.register_profile("same", derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile("search", deadline=None, print_blob=True, max_examples=5_000)
settings.load_profile("same")

pytest_plugins = ["tests.suite.tiers", "tests.suite.order", "tests.suite.shared"]

# Where `make programs` unpacks what the machine does not have.
os.environ["PATH"] += os.pathsep + str(Path(sys.prefix, "debian", "usr", "bin"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write golden stories and diagrams anew, for review"
    )
    parser.addoption(
        "--all-groups",
        action="store_true",
        help="also the cases of rank groups that `make test-all` leaves out",
    )
    parser.addoption(
        "--all-models",
        action="store_true",
        help="also the models of every type that the model library knows: `make verify-models`",
    )
    parser.addoption(
        "--emulated",
        action="store_true",
        help="also kernels for other CPUs and with faults: `make verify-kernels`",
    )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be regenerated instead of compared."""
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture
def slow() -> Iterator["Slow"]:
    """The vocabulary of a worker's grammars, which is there when a test lets it go."""
    from tests.grammars.answers import Slow

    made = Slow()
    yield made
    made.go.set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, and so count in the summary, the tests of a GPU where there is none, and those that take long
    and were not asked for."""
    if not config.getoption("--emulated"):
        _deselect(config, items, "emulated")
    if not config.getoption("--all-groups"):
        _deselect(config, items, "all_groups")
    if not config.getoption("--all-models"):
        _deselect(config, items, "all_models")
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            _deselect(config, items, "gpu")


def _deselect(config: pytest.Config, items: list[pytest.Item], mark: str) -> None:
    marked = [item for item in items if item.get_closest_marker(mark)]
    if marked:
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model, converted once and kept in the user's cache, as `baton serve` does it."""
    return prepare(resolve(DEMO), print)
