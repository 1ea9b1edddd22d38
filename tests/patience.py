"""How long does a test wait for what must come?"""

import os
from typing import Final

SHORTER: Final = "TESTS_PATIENCE_S"
"""Of the environment: for runs in which it is expected that some things never come (`tests/mutants`)."""
PATIENCE_S: Final = float(os.environ.get(SHORTER, "20"))
"""Far above what anything takes that is waited for so long: reaching it is a failure, not a measurement."""
