"""Measurement of how much of a room's transfer happens while the engine computes."""

from dataclasses import dataclass


@dataclass(slots=True)
class Overlap:
    """Overlap of one room. Time of a transfer during a step does not delay its answer."""

    length: int = 0
    """Bytes whose writes are known to have ended."""
    spent_us: int = 0
    """Microseconds during which ready pages were not all written."""
    hidden_us: int = 0
    """Microseconds of that during which a step ran."""
    _until_us: int | None = None
    """Time in microseconds up to which the present transfer is counted."""

    def looked(self, start_us: int, stop_us: int, *, goes_on: bool, beside: bool) -> None:
        """Add one look at the pages of a room that had pages to write.

        `start_us`, `stop_us`: begin and end of the look, in microseconds. `goes_on`: whether pages were
        left at its end. `beside`: whether a step was running.
        """
        spent_us = stop_us - (start_us if self._until_us is None else self._until_us)
        self.spent_us += spent_us
        if beside:
            self.hidden_us += spent_us
        self._until_us = stop_us if goes_on else None

    @property
    def summary(self) -> str:
        return f"{self.length} bytes in {self.spent_us} us, {self.hidden_us} us of them beside steps"
