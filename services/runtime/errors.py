"""Expected errors that stop a process from starting, or end it.

They end the process with one line on stderr and a non-zero exit code, without a traceback. The line says what
its operator can do. Any other exception that escapes a service is a bug and shows its traceback.
"""

from typing import Final

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_GROUP: Final = 3
"""Exit code of a rank that ends because of another rank. That rank's log has the cause."""


class StartupError(Exception):
    """Something outside the program prevents a start or forces an end: a model, a port, memory, a device.

    The text is one or two sentences: what is wrong, with the offending value, and what to change.
    """

    exit_code: int = EXIT_FAILED


class MemoryNotMoved(StartupError):
    """KV memory that peers might still write to could not be moved to another address.

    The process ends instead, which proves as well that no write lands. The program that started it starts it
    again.
    """


class ReportedGone(StartupError):
    """Another process has reported to the router that this process exited, and its peers were notified.

    It ends at once to make that true. The program that started it starts it again.
    """


class GroupLost(StartupError):
    """Another rank of this worker is gone, late, or disagrees.

    This rank can finish nothing any more, least of all a running step. The process ends without waiting for
    the step. The program that started the ranks starts them again.
    """

    exit_code: int = EXIT_GROUP


class EngineStuck(StartupError):
    """A running step of the model does not end. The process ends without waiting for it."""


class SettingsError(StartupError):
    """A flag or variable is unknown, or its value is not allowed. The text names it and what is allowed."""

    exit_code: int = EXIT_USAGE


def describe_error(error: BaseException) -> str:
    """Return an error as one line of text: its class name and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
