"""Bounds on messages to workers and to the router's timelines."""

from typing import Final

TAKEN_BYTES_MAX: Final = 8 << 20
"""Longest command in bytes, which fills a turn."""

REPORTS_MAX: Final = 1024
"""Most timeline lines in one report."""
