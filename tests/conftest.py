"""Settings and fixtures that several kinds of tests share."""

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

pytest_plugins = ["tests.suite.plugin"]

# Where `make programs` unpacks what the machine does not have.
os.environ["PATH"] += os.pathsep + str(Path(sys.prefix, "debian", "usr", "bin"))


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be regenerated instead of compared."""
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture
def slow() -> Iterator["Slow"]:
    """Reader of a worker's grammar vocabulary, which waits until a test releases it."""
    from tests.grammars.answers import Slow

    made = Slow()
    yield made
    made.go.set()


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model, converted once and kept in the user's cache, as `baton serve` does it."""
    return prepare(resolve(DEMO), print)
