"""Expected errors that stop a process from starting, or end it.

They end the process with one line on stderr and a non-zero exit code, without a traceback. The line says what
its operator can do. Any other exception that escapes a service is a bug and shows its traceback.
"""

from typing import Final

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_GROUP: Final = 3
"""Exit code of a rank that ends because of another rank. Look for the cause there first."""


class StartupError(Exception):
    """Something outside the program is missing or in the way: a model, a port, memory, a device.

    The text is one or two sentences: what is wrong, with the offending value, and what to change.
    """

    exit_code: int = EXIT_FAILED


class MemoryNotMoved(StartupError):
    """Memory that had to be taken back from its writers could not be moved.

    The end of the process is the same proof that no write lands. Its starter starts it again.
    """


class ReportedGone(StartupError):
    """This process was reported gone to the router, which has notified its peers.

    It ends at once to make that true. Its starter starts it again.
    """


class GroupLost(StartupError):
    """Another rank of this worker is gone, late, or disagrees.

    Nothing can be finished any more, least of all a running step. The process ends without waiting for it,
    and the starter of the group starts it again.
    """

    exit_code: int = EXIT_GROUP


class EngineStuck(StartupError):
    """A running step of the model does not end. The process ends without waiting for it."""


class SettingsError(StartupError):
    """A flag or variable is unknown, or its value is not allowed. The text names it and what is allowed."""

    exit_code: int = EXIT_USAGE


def describe_error(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
