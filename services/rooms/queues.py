"""In which queue does a room stand on its worker, in the field's words?"""

from enum import StrEnum


class RoomQueue(StrEnum):
    """In the order in which a request passes through them. Metrics and the pages for people say so."""

    BOOTSTRAP = "bootstrap"
    """Prefill: its destination is not known on every rank."""
    PREALLOC = "prealloc"
    """Decode: it has no pages."""
    TRANSFER = "transfer"
    """Decode: its pages are granted, and have not landed on every rank."""
    WAITING = "waiting"
    """Prefill: it is not computed to its end. Decode: a sequence of it does not fit the batch."""
    INFLIGHT = "inflight"
    """Prefill: it is computed, and not all of it is written."""
    RUNNING = "running"
    """Decode: a sequence of it is continued."""
