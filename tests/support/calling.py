"""Recorder of steps on devices without graphs."""

from collections.abc import Callable

from baton.engine.execution.cuda_graphs import Replay


class Calling:
    """The twin of `CudaGraphRecorder` on a CPU: replaying is calling."""

    def record(self, work: Callable[[], object]) -> Replay:
        work()
        return work
