"""What can stop a process from starting, or has to end it, in words that its operator can act on?

These are expected: they end the process with one line on stderr and a non-zero exit code, without a
traceback. Everything else that escapes a service is a bug and keeps its traceback.
"""

EXIT_FAILED = 1
EXIT_USAGE = 2


class StartupError(Exception):
    """Something outside the program is missing or in the way: a model, a port, memory, a device.

    The text is one or two sentences: what is wrong, with the offending value, and what to change.
    """

    exit_code: int = EXIT_FAILED


class MemoryKept(StartupError):
    """Memory that had to be taken back from its writers could not be moved. That the process ends is the same
    proof; whoever started it starts it again."""


class SettingsError(StartupError):
    """A flag or a variable that is unknown or whose value is not allowed; names it and what is."""

    exit_code: int = EXIT_USAGE
