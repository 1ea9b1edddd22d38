"""Program that prepares a model's files for fast loading, once, in a process of its own.

    python -m baton.launch.prepare_model MODEL LOAD_FORMAT

It writes a line for each step, which begins with PROGRESS.
"""

import os
import sys
from io import TextIOWrapper
from typing import Final

from baton.runtime.environment_check import clean_environment
from baton.runtime.errors import StartupError
from baton.runtime.service_process import report_startup_error

PROGRESS: Final = "progress: "


def main(model: str, load_format: str) -> int:
    """Find and prepare the model `model`. Return the exit code."""
    clean_environment(os.environ)
    from baton.models.model_files import prepare, resolve
    from baton.runtime.model_options import LoadFormat

    if isinstance(sys.stdout, TextIOWrapper):  # file names may have characters that the output cannot
        sys.stdout.reconfigure(errors="replace")

    def report(line: str) -> None:
        sys.stdout.write(f"{PROGRESS}{line}\n")
        sys.stdout.flush()

    try:
        prepare(resolve(model, LoadFormat(load_format)), report)
    except StartupError as error:
        return report_startup_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
