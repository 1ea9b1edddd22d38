"""What can go wrong with pages, slots and records."""

from collections.abc import Iterable


def added(counts: Iterable[int]) -> str:
    """So many pages of each group, as an error says it."""
    return " + ".join(map(str, counts))


class PagesError(Exception):
    """Base of everything the pages package raises."""


class OutOfPages(PagesError):
    """Fewer free pages or slots than asked for; nothing was taken. Callers check first."""


class IllegalPageMove(PagesError):
    """A page or slot asked to change state in a way the table does not list: a bug here."""


class LayoutMismatch(PagesError):
    """Two layouts that cannot be mapped onto each other. Names the field (`schema-agreed`)."""

    def __init__(self, field: str, one: object, other: object) -> None:
        """`one`, `other`: the values, and whose they are."""
        super().__init__(f"{field} differs: {one}, {other}")
        self.field = field


class DoesNotDivide(PagesError):
    """A model that cannot be split among so many ranks. Names the dimension (`tensor_parallel`, …)."""

    def __init__(self, field: str, ranks: int, possible: str) -> None:
        super().__init__(f"{field} {ranks}: {possible}")
        self.field = field


class Truncated(PagesError):
    """Source and target page counts differ (`no-truncation`)."""


class RecordCorrupt(PagesError):
    """A sealed record whose checksum or content does not hold."""


class RecordForeign(PagesError):
    """A slot sealed by another room or generation than the one that owns it (`slot-owner`)."""
