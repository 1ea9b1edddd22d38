"""What tells turns of a test that nothing from outside waits for them, so that one round follows each?"""


class NoArrivals:
    """`baton.runtime.pending_events.PendingEvents` of a loop to which nothing comes."""

    def waiting(self, lull_us: int) -> bool:
        return False

    def came(self) -> None: ...
