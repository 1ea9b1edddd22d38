"""How much may one message bring to a worker's turns, or to the bootstrap's timelines?"""

from typing import Final

TAKEN_BYTES_MAX: Final = 8 << 20
"""Longest command, which a turn takes alone."""

REPORTS_MAX: Final = 1024
"""Lines of timelines in one report."""
