"""What does a step of the engine compute for each room, and what comes of it?"""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from baton.engine_interface import GrammarUnsatisfied, Row, RowResult
from baton.handover.handover_side import HandOverSide
from baton.rooms.errors import Reason
from baton.rooms.room import Room
from baton.rooms.step_cost import StepCost
from baton.worker.assembly import RankPorts
from baton.worker.metrics import WorkerMetrics
from baton.worker.step_thread import STEP_MS, StepFailed


class StepPart(Protocol):
    """What a step computes for one room."""

    @property
    def room(self) -> Room: ...


P = TypeVar("P", bound=StepPart)


class StepScheduler(Generic[P]):
    """One step at a time. Its rooms are busy until it has ended, whatever becomes of them."""

    def __init__(
        self, core: HandOverSide[Any, Any], ports: RankPorts, metrics: WorkerMetrics, cost: StepCost
    ) -> None:
        self.tokens = 0
        """Computed or drawn, since start."""
        self.cost = cost
        """Of what a step computes: measured here, and agreed."""
        self._core_side = core
        self._ports = ports
        self._worker_metrics = metrics
        self._step: Sequence[P] = ()
        self._started_us = 0

    def __len__(self) -> int:
        """Parts of the running step."""
        return len(self._step)

    @property
    def free(self) -> bool:
        return self._ports.step_thread.free

    @property
    def goes_on(self) -> bool:
        """A step runs, and for no longer than one may take."""
        return bool(self._step) and self.running_us < STEP_MS * 1000

    @property
    def running_us(self) -> int:
        """Microseconds since the last step was started."""
        return self._ports.clock.host_us() - self._started_us

    @property
    def computing_us(self) -> int:
        """The same, without what the step waited for another worker's on its thread."""
        return self.running_us - self._ports.step_thread.waited_us

    def _start(self, step: Sequence[P], rows: Sequence[Row]) -> bool:
        """Whether there is anything to compute, which is started. Only while `free`. `rows`: of the parts."""
        if step:
            for part in step:
                part.room.busy = True
            self._step, self._started_us = step, self._ports.clock.host_us()
            self._ports.step_thread.start(rows)
        return bool(step)

    def _take(self) -> tuple[Sequence[P], Sequence[RowResult]] | None:
        """The parts of the step that ended, and what comes of each; None where no step has. The rooms
        of one that failed have failed."""
        failure: StepFailed | None = None
        taken: Sequence[RowResult] | None = ()
        try:
            taken = self._ports.step_thread.take()
        except StepFailed as error:
            failure = error
        if taken is None:
            return None
        step, self._step = self._step, ()
        for part in step:
            part.room.busy = False
        if failure is not None:
            for part in step:
                self._fail(part, failure)
            return (), ()
        self._worker_metrics.stepped(self.running_us / 1e6)
        return step, taken

    def _fail(self, part: P, why: Exception) -> None:
        """The part's room ends: `why` nothing was drawn for it."""
        reason = Reason.GRAMMAR_FAILED if isinstance(why, GrammarUnsatisfied) else Reason.ENGINE_FAILED
        self._core_side.fail(part.room, reason, f"{part.room.SIDE.value}: {why}")
