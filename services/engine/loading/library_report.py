"""Error messages of the transformers library in one line, and its report on weights that it could not load.

The library logs the report as a table of many lines, and its errors refer to "the above report". Here the
report is read instead of logged, so that one line says what is wrong.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LOGGER: Final = "transformers.modeling_utils"
TITLE: Final = "LOAD REPORT"
REFERS: Final = "above report"
CAUSE: Final = re.compile(
    r"^\w+(?:Error|Exception): (.+)\n.*\nError.* (?:destined for|processing parameter) (\S+?)(?:\. .*)?$",
    re.MULTILINE,
)
"""Pattern with two groups for transformers' report on weights: an error's text, and the weight for which it
occurred."""


class LoadReport(logging.Filter):
    """Log filter that takes transformers' report on weights out of the log and stores its text."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if TITLE not in message:
            return True
        self._text = message
        return False

    def explain(self, error: str) -> str:
        """Return the text of a transformers `error`, or its cause from the report if the error only refers to
        that."""
        if REFERS not in error:
            return error
        found = CAUSE.search(self._text)
        return f"{found[2]}: {found[1]}" if found else "weights do not fit the model's definition"


@contextmanager
def load_report() -> Iterator[LoadReport]:
    """Capture transformers' report on weights while it loads a model within the context."""
    report, logger = LoadReport(), logging.getLogger(LOGGER)
    logger.addFilter(report)
    try:
        yield report
    finally:
        logger.removeFilter(report)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its class name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
