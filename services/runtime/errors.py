"""What can stop a process from starting, or has to end it, in words that its operator can act on?

These are expected: they end the process with one line on stderr and a non-zero exit code, without a
traceback. Everything else that escapes a service is a bug and keeps its traceback.
"""

from typing import Final

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_GROUP: Final = 3
"""Another rank of the worker is the reason: whoever looks for the cause looks there first."""


class StartupError(Exception):
    """Something outside the program is missing or in the way: a model, a port, memory, a device.

    The text is one or two sentences: what is wrong, with the offending value, and what to change.
    """

    exit_code: int = EXIT_FAILED


class MemoryNotMoved(StartupError):
    """Memory that had to be taken back from its writers could not be moved. That the process ends is the same
    proof; whoever started it starts it again."""


class ReportedGone(StartupError):
    """The bootstrap was told that this process is gone, and told its peers. It ends at once, so that it is
    true, and whoever started it starts it again."""


class GroupLost(StartupError):
    """Another rank of this worker is gone, late, or disagrees. Nothing here can be finished any more, a
    running step least of all: the process ends without waiting for it, and whoever started the group starts
    it again."""

    exit_code: int = EXIT_GROUP


class EngineStuck(StartupError):
    """A running step of the model does not end: the process ends without waiting for it."""


class SettingsError(StartupError):
    """A flag or a variable that is unknown or whose value is not allowed; names it and what is."""

    exit_code: int = EXIT_USAGE


def describe_error(error: BaseException) -> str:
    """Its kind, and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
