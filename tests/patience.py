"""The longest time that a test waits for something that has to come."""

import os
from typing import Final

PATIENCE_S: Final = float(os.environ.get("TESTS_PATIENCE_S", "20"))
"""Far above what anything takes that is waited for so long: reaching it is a failure, not a measurement.
Less is for runs in which some things are expected never to come (`tests/mutants`)."""
