"""Two authorities, made once: the stack's, and one that nobody believes."""

from pathlib import Path

import pytest

from tests.safety.certificates import made


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("certs") / "ours")


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("certs") / "strangers")
