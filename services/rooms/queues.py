"""Queues in which a room may stand on its worker, by SGLang's names."""

from enum import StrEnum


class RoomQueue(StrEnum):
    """Queue of a room, in the order in which a request passes through them. Metrics and pages show these
    names."""

    BOOTSTRAP = "bootstrap"
    """Prefill: the destination is not known on every rank."""
    PREALLOC = "prealloc"
    """Decode: the room has no pages."""
    TRANSFER = "transfer"
    """Decode: pages are granted, and have not landed on every rank."""
    WAITING = "waiting"
    """Prefill: the prompt is not computed to its end. Decode: a sequence does not fit the batch."""
    INFLIGHT = "inflight"
    """Prefill: the prompt is computed, and not all of it is written."""
    RUNNING = "running"
    """Decode: a sequence runs."""
