"""Commands and environments of child processes that run this package.

`python -m` looks for packages in the working directory first, where a user's project may have a package
called `baton`. Every child is therefore started by these functions, and runs the code of its parent.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import baton

TETHER: Final = "baton.runtime.parent_watch"
NOT_INHERITED: Final = ("PYTHONOPTIMIZE", "PYTHONWARNINGS")
"""Variables that change what a library's code does, and that no child gets (see `surroundings`)."""


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs `module` in this interpreter. Its environment is `child_environ`'s."""
    return (sys.executable, "-m", module, *arguments)


def tied_command(*command: str) -> tuple[str, ...]:
    """Return the command that runs `command` in a child that the kernel kills when this process ends."""
    return (*module_command(TETHER, str(os.getpid())), *command)


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the variables by which a child imports this very package."""
    root = str(Path(baton.__file__ or "").resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))
    inherited = {name: value for name, value in environ.items() if name not in NOT_INHERITED}
    return {**inherited, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
