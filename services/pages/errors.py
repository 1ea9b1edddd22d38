"""Errors of pages, slots and records."""

from collections.abc import Iterable


def added(counts: Iterable[int]) -> str:
    """Return numbers of pages by group as an error shows them."""
    return " + ".join(map(str, counts))


class PagesError(Exception):
    """Base class of the errors of this package."""


class OutOfPages(PagesError):
    """There are fewer free pages or slots than requested. Nothing was reserved. Callers check first."""


class IllegalPageMove(PagesError):
    """A page or slot was to make a move that the table does not list, which is a bug."""


class LayoutMismatch(PagesError):
    """Two layouts cannot be mapped onto each other. The text names the field (`schema-agreed`)."""

    def __init__(self, field: str, one: object, other: object) -> None:
        """Make it. `one`, `other`: values of the field, with their owners."""
        super().__init__(f"{field} differs: {one}, {other}")
        self.field = field


class DoesNotDivide(PagesError):
    """A model cannot be split among so many ranks. The text names the dimension (`tensor_parallel`, …)."""

    def __init__(self, field: str, ranks: int, possible: str) -> None:
        super().__init__(f"{field} {ranks}: {possible}")
        self.field = field


class Truncated(PagesError):
    """The page counts of source and target differ (`no-truncation`)."""


class RecordCorrupt(PagesError):
    """The checksum or the content of a sealed record is wrong."""


class RecordForeign(PagesError):
    """A slot was sealed by another room or generation than its owner (`slot-owner`)."""
