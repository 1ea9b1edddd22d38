"""Command lines and environments of child processes that run Baton's own code.

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
"""Python module that runs the command `baton`."""
FORK_SERVER: Final = "baton.cli.forked_commands"
"""Python module that runs the fork server, from which workers are forked."""
PARENT_WATCH: Final = "baton.runtime.parent_watch"
NOT_INHERITED: Final = ("PYTHONOPTIMIZE", "PYTHONWARNINGS")
"""Environment variables that change how libraries behave. No child inherits them (see
`environment_check`)."""


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line that runs `module` in this interpreter. It needs `child_environ` as its
    environment."""
    return (sys.executable, "-m", module, *arguments)


def baton_command(*words: str) -> tuple[str, ...]:
    """Return the command line that runs `baton WORDS`. It needs `child_environ` as its environment."""
    return module_command(COMMAND, *words)


def tied_command(*command: str) -> tuple[str, ...]:
    """Return a command line that runs `command` in a child that the kernel kills when this process ends."""
    return (*module_command(PARENT_WATCH, str(os.getpid())), *command)


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child that imports the same `baton` package as this process.

    `environ`: variables that the child inherits.
    """
    root = str(Path(baton.__file__ or "").resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))
    inherited = {name: value for name, value in environ.items() if name not in NOT_INHERITED}
    return {**inherited, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
