"""Models and engines that tests of sampling share with those of the engine."""

from tests.engine.conftest import directory, tiny_dir, tiny_engine

__all__ = ["directory", "tiny_dir", "tiny_engine"]
