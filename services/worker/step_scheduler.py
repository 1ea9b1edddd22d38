"""Scheduling of engine steps, common to prefill and decode: their start, their end and their failures."""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from baton.engine_interface import GrammarUnsatisfied, Row, RowResult
from baton.handover.handover_side import HandOverSide
from baton.rooms.errors import Reason
from baton.rooms.room import Room
from baton.rooms.steps.step_cost import StepCost
from baton.worker.assembly import RankPorts
from baton.worker.metrics import WorkerMetrics
from baton.worker.step_thread import STEP_MS, StepFailed


class StepPart(Protocol):
    """Part of an engine step that belongs to one room: a row of a choice, or a chunk of a prompt."""

    @property
    def room(self) -> Room: ...


P = TypeVar("P", bound=StepPart)


class StepScheduler(Generic[P]):
    """Base class of the schedulers of prefill and decode steps. It runs one engine step at a time. The rooms
    in a step are busy until the step has ended."""

    def __init__(
        self, core: HandOverSide[Any, Any], ports: RankPorts, metrics: WorkerMetrics, cost: StepCost
    ) -> None:
        self.tokens = 0
        """Number of prompt tokens computed and output tokens sampled on this rank since the start."""
        self.cost = cost
        """Estimated cost of the positions in an engine step. Each rank measures it, but all ranks use the
        leader's numbers."""
        self._core_side = core
        self._ports = ports
        self._worker_metrics = metrics
        self._step: Sequence[P] = ()
        self._started_us = 0

    def __len__(self) -> int:
        """Return the number of parts of the running step."""
        return len(self._step)

    @property
    def free(self) -> bool:
        return self._ports.step_thread.free

    @property
    def goes_on(self) -> bool:
        """Whether a step is running, and for less than STEP_MS so far."""
        return bool(self._step) and self.running_us < STEP_MS * 1000

    @property
    def running_us(self) -> int:
        """Microseconds since the last step was started."""
        return self._ports.clock.host_us() - self._started_us

    @property
    def computing_us(self) -> int:
        """Microseconds since the running step began to compute. Time in which the thread ran another worker's
        step does not count."""
        return self.running_us - self._ports.step_thread.waited_us

    def _start(self, step: Sequence[P], rows: Sequence[Row]) -> bool:
        """Start a step if it has any parts. Return whether it was started. Call it only while `free`. `rows`:
        engine rows of the parts."""
        if step:
            for part in step:
                part.room.busy = True
            self._step, self._started_us = step, self._ports.clock.host_us()
            self._ports.step_thread.start(rows)
        return bool(step)

    def _take(self) -> tuple[Sequence[P], Sequence[RowResult]] | None:
        """Return the parts of the ended step, and the result of each. Return None if no step has ended. If
        the step failed, its rooms fail and there are no parts."""
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
        """Fail the room of one part of a step. `why`: error for which the part has no sampled token."""
        reason = Reason.GRAMMAR_FAILED if isinstance(why, GrammarUnsatisfied) else Reason.ENGINE_FAILED
        self._core_side.fail(part.room, reason, f"{part.room.SIDE.value}: {why}")
