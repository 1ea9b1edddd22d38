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

COMMAND: Final = "baton.cli.main"
"""Module of the command `baton`."""
FORK_SERVER: Final = "baton.cli.forked_commands"
"""Module of the process that workers are forked from."""
PARENT_WATCH: Final = "baton.runtime.parent_watch"
NOT_INHERITED: Final = ("PYTHONOPTIMIZE", "PYTHONWARNINGS")
"""Variables that change what a library's code does. No child inherits them (see `environment_check`)."""


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs `module` in this interpreter. Its environment is `child_environ`'s."""
    return (sys.executable, "-m", module, *arguments)


def baton_command(*words: str) -> tuple[str, ...]:
    """Return the command that runs `baton WORDS`."""
    return module_command(COMMAND, *words)


def tied_command(*command: str) -> tuple[str, ...]:
    """Return the command that runs `command` in a child that the kernel kills when this process ends."""
    return (*module_command(PARENT_WATCH, str(os.getpid())), *command)


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the variables by which a child imports this very package."""
    root = str(Path(baton.__file__ or "").resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))
    inherited = {name: value for name, value in environ.items() if name not in NOT_INHERITED}
    return {**inherited, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
