"""A backend for tests of the Responses API, whose conversations are long."""

import pytest

from baton.api.backend import Limits
from tests.api.scripted import ScriptedBackend


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(known_limits=Limits(8192, 8000, 8192))
