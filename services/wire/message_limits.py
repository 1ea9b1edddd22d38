"""Size limits of messages to workers, and of reports to the router's timelines."""

from typing import Final

TAKEN_BYTES_MAX: Final = 8 << 20
"""Longest command to a worker, in bytes, with the bytes that frame it. A longer one is refused."""

REPORTS_MAX: Final = 1024
"""Most timeline lines in one report."""
