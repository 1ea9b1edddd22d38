"""Measurement of how much of a room's transfer happens while the engine computes."""

from dataclasses import dataclass


@dataclass(slots=True)
class Overlap:
    """Measurement of one room's transfer: how much of it happens while engine steps run. That part does not
    delay the response."""

    length: int = 0
    """Bytes of the room's pages whose writes are known to have ended."""
    spent_us: int = 0
    """Microseconds during which the room had computed pages that were not all written yet."""
    hidden_us: int = 0
    """Microseconds of `spent_us` during which an engine step ran, so that the transfer delayed nothing."""
    _until_us: int | None = None
    """Time in microseconds up to which the room's present transfer is counted. None while all pages that are
    ready are written."""

    def looked(self, start_us: int, stop_us: int, *, goes_on: bool, beside: bool) -> None:
        """Count the time of the room's transfer since its last poll.

        `start_us`, `stop_us`: begin and end of this poll, in microseconds. `goes_on`: whether pages were left
        to write at its end. `beside`: whether a step was running.
        """
        spent_us = stop_us - (start_us if self._until_us is None else self._until_us)
        self.spent_us += spent_us
        if beside:
            self.hidden_us += spent_us
        self._until_us = stop_us if goes_on else None

    @property
    def summary(self) -> str:
        return f"{self.length} bytes in {self.spent_us} us, {self.hidden_us} us of them beside steps"
