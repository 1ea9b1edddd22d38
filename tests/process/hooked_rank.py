"""One rank of a worker, started by hand, that a test can do something to: the product's own command, in a
process with the hooks of `tests/process/hooks.py`.

    HOOKS=FOLDER python -m tests.process.hooked_rank prefill --tp 2 --rank 0 --rendezvous HOST:PORT …
"""

import os
from pathlib import Path
from typing import Final

from services.cli.main import main
from tests.process.hooks import Folder, install

FOLDER: Final = "HOOKS"
"""The environment variable that names the rank's folder."""

if __name__ == "__main__":
    install(Folder(Path(os.environ[FOLDER])))
    main()
