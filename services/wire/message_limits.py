"""Size limits of messages to workers, and of reports to the router's timelines."""

from typing import Final

TAKEN_BYTES_MAX: Final = 8 << 20
"""Longest command to a worker, in bytes. One of this length fills a turn."""

REPORTS_MAX: Final = 1024
"""Most timeline lines in one report."""
