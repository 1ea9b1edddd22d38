"""The longest time that a test waits for something that has to come."""

import os
from typing import Final

PATIENCE_S: Final = float(os.environ.get("TESTS_PATIENCE_S", "20"))
"""Longest wait of a test, seconds. It is far above any expected time: reaching it is a failure, not a
measurement. Runs in which some events are expected never to come use less (`tests/mutants`)."""
