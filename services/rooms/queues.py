"""Queues in which a room may wait on its worker, under SGLang's names."""

from enum import StrEnum


class RoomQueue(StrEnum):
    """Queue that a room is in, listed in the order in which a request passes through them. Metrics and pages
    show these names."""

    BOOTSTRAP = "bootstrap"
    """Queue of rooms on prefill whose destination pages are not known on every rank yet."""
    PREALLOC = "prealloc"
    """Queue of rooms on decode that have no pages yet."""
    TRANSFER = "transfer"
    """Queue of rooms on decode whose granted pages have not arrived on every rank."""
    WAITING = "waiting"
    """Queue of rooms that wait for computation. On prefill, the prompt is not computed to its end. On decode,
    a sequence does not fit the batch."""
    INFLIGHT = "inflight"
    """Queue of rooms on prefill whose prompt is computed, but whose pages are not all written yet."""
    RUNNING = "running"
    """Queue of rooms on decode that have a sequence in the batch."""
