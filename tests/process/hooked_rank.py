"""One rank of a worker, started by hand, that a test can do something to: the product's own command, in a
process with the hooks of `tests/process/hooks.py`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from baton.cli.main import main
from tests.process.hooks import Folder, install


def run(folder: Path, words: Sequence[str]) -> None:
    """Run `baton WORDS` with the hooks in `folder`."""
    install(Folder(folder))
    sys.argv[1:] = words
    main()
