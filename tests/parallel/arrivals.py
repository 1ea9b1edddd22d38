"""A stand-in for pending events that reports none, so that one round of the loop follows each turn."""


class NoArrivals:
    """`baton.worker.pending_events.PendingEvents` of a loop to which nothing comes."""

    def waiting(self, lull_us: int) -> bool:
        return False

    def came(self) -> None: ...
