"""Fixtures for the tests of the launcher."""

from pathlib import Path

import pytest

from tests.launch.stand_ins import Parts


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path / "journal")
