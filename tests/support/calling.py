"""What records steps where there are no graphs?"""

from collections.abc import Callable

from baton.engine.graphs import Replay


class Calling:
    """The twin of `Capturing` on a CPU: replaying is calling."""

    def record(self, work: Callable[[], object]) -> Replay:
        work()
        return work
