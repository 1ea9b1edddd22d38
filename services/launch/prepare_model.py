"""Is the model there in a form that loads fast? Made so once, in a process of its own.

    python -m baton.launch.prepare_model MODEL LOAD_FORMAT

Writes a line for each thing it does, each beginning with PROGRESS.
"""

import os
import sys
from io import TextIOWrapper
from typing import Final

from baton.runtime.environment_check import settle
from baton.runtime.errors import StartupError
from baton.runtime.service_process import tell

PROGRESS: Final = "progress: "


def main(model: str, load_format: str) -> int:
    """Resolve and prepare `model`. Returns the exit code."""
    settle(os.environ)
    from baton.models.model_files import prepare, resolve
    from baton.runtime.model_options import LoadFormat

    if isinstance(sys.stdout, TextIOWrapper):  # as the command itself: a file may have any name
        sys.stdout.reconfigure(errors="replace")
    try:
        prepare(resolve(model, LoadFormat(load_format)), lambda line: print(f"{PROGRESS}{line}", flush=True))
    except StartupError as error:
        return tell(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
