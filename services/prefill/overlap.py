"""How much of a room's transfer went on beside the engine's steps?"""

from dataclasses import dataclass


@dataclass(slots=True)
class Overlap:
    """Of one room's pages. What goes on beside a step costs its answer nothing."""

    length: int = 0
    """Bytes seen to have been written."""
    spent_us: int = 0
    """While pages that were ready were not all written."""
    hidden_us: int = 0
    """Of that, beside a step."""
    _until_us: int | None = None
    """How far the transfer that goes on is counted."""

    def looked(self, start_us: int, stop_us: int, *, goes_on: bool, beside: bool) -> None:
        """Pages were to be written when a look at them began, at `start_us`. `goes_on`: there still are some
        at `stop_us`. `beside`: a step was running."""
        spent_us = stop_us - (start_us if self._until_us is None else self._until_us)
        self.spent_us += spent_us
        if beside:
            self.hidden_us += spent_us
        self._until_us = stop_us if goes_on else None

    @property
    def summary(self) -> str:
        return f"{self.length} bytes in {self.spent_us} us, {self.hidden_us} us of them beside steps"
