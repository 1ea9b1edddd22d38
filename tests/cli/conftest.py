"""Fixtures for the tests of the command line."""

from tests.launch.conftest import parts

__all__ = ["parts"]
