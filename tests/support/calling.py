"""What records steps where there are no graphs?"""

from collections.abc import Callable

from baton.engine.execution.cuda_graphs import Replay


class Calling:
    """The twin of `CudaGraphRecorder` on a CPU: replaying is calling."""

    def record(self, work: Callable[[], object]) -> Replay:
        work()
        return work
