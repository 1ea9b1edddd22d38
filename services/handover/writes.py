"""Protocol of the writes of one room to its receiver, as the sending side observes them."""

from typing import Protocol


class Writes(Protocol):
    """Progress of the writes of one room to its receiver."""

    @property
    def failure(self) -> str | None: ...
    @property
    def written(self) -> bool:
        """Whether all pages and records that this rank sends for the room have arrived: the state of their
        writes is DONE."""

    @property
    def sealed(self) -> bool:
        """Whether the seals (the marks that all data is written) have arrived: the state of their writes is
        DONE."""
