"""Exceptions about KV pages, metadata slots and metadata records."""

from collections.abc import Iterable


def added(counts: Iterable[int]) -> str:
    """Return page counts of several KV groups as text for an error message, such as "12 + 3"."""
    return " + ".join(map(str, counts))


class PagesError(Exception):
    """Base class of the errors of this package."""


class OutOfPages(PagesError):
    """Error: fewer pages or metadata slots are free than a caller requested. Nothing was reserved."""


class IllegalPageMove(PagesError):
    """Error: the present state of a page, slot or holding does not allow an operation. The caller has a
    bug."""


class LayoutMismatch(PagesError):
    """Error: KV layouts of two workers cannot be mapped onto each other. The text names the differing field
    (`schema-agreed`)."""

    def __init__(self, field: str, one: object, other: object) -> None:
        """Make the error. `field`: name of the differing field. `one`, `other`: texts with the field's value
        and the rank or worker that has it."""
        super().__init__(f"{field} differs: {one}, {other}")
        self.field = field


class DoesNotDivide(PagesError):
    """Error: a model cannot be split among this number of ranks. The text names the dimension, such as
    `tensor_parallel`."""

    def __init__(self, field: str, ranks: int, possible: str) -> None:
        super().__init__(f"{field} {ranks}: {possible}")
        self.field = field


class Truncated(PagesError):
    """Error: the page counts of the two sides of a transfer do not match, so that KV would be lost
    (`no-truncation`)."""


class RecordCorrupt(PagesError):
    """Error: a metadata slot was sealed by its owner, but the checksum or the content of its record is
    wrong."""


class RecordForeign(PagesError):
    """Error: a metadata slot was sealed by another room or generation than its owner (`slot-owner`)."""
