"""What does a room's caller hear, and the room's timeline with it?

Accepted, then tokens of each choice, then one outcome, when the last choice has ended. Only the leader has
callers; the other ranks say the same to nobody.
"""

from collections.abc import Iterable

from services.decode.job import Choice, Job
from services.rooms.errors import Cause
from services.rooms.evidence import Finished
from services.rooms.plurals import counted
from services.rooms.request import Token
from services.rooms.timeline import Moment
from services.wire.baton.v1 import inference_pb2
from services.wire.conversions import finish_to_wire, token_to_wire
from services.worker.metrics import WorkerMetrics
from services.worker.reporter import Reporter


class Answers:
    def __init__(self, reporter: Reporter, metrics: WorkerMetrics) -> None:
        self._reporter = reporter
        self._metrics = metrics

    def accept(self, job: Job) -> None:
        receiver = job.receiver
        self._reporter.opened(receiver.id, job.request)
        job.reply(inference_pb2.StreamRoomReply(accepted=inference_pb2.Accepted()))
        self._reporter.note(receiver.id, Moment.ACCEPTED, f"{counted(receiver.pages_needed, 'page')} needed")

    def emit(self, job: Job, choice: Choice, token: Token) -> None:
        """Send the token that was just appended to the choice's output; end the choice with its last one."""
        output = choice.sequence.output
        finish = job.request.finish_reason(output)
        tokens = inference_pb2.Tokens(
            first=len(output) - 1,
            tokens=[token_to_wire(token)],
            finish=finish_to_wire(finish),
            choice=choice.place,
        )
        job.reply(inference_pb2.StreamRoomReply(tokens=tokens))
        if finish is not None:
            self._end(job, choice, finish.value)

    def cut(self, job: Job, choice: Choice) -> None:
        """The choice's reader has all it wants of it, and is told nothing more of it."""
        job.ends.cut.add(choice.place)
        if choice.place in job.ends.going_on and not job.outcome_told:
            self._end(job, choice, "cut off")

    def _end(self, job: Job, choice: Choice, how: str) -> None:
        """End the room with its last choice (`choices-end-alone`)."""
        last = job.ends.end(choice.place)
        told = f"{counted(len(choice.sequence.output), 'token')}, {how}"
        several = len(job.choices) > 1
        if several:
            self._reporter.note(job.receiver.id, Moment.CHOICE_ENDED, f"choice {choice.place}: {told}")
        if not last:
            return
        if several:
            drawn = sum(len(each.sequence.output) for each in job.choices)
            told = f"{counted(len(job.choices), 'choice')}, {counted(drawn, 'token')}"
        job.finished = True
        job.receiver.note(Finished())
        job.tell_outcome(None)
        self._reporter.note(job.receiver.id, Moment.FINISHED, told)

    def end_early(self, job: Job) -> None:
        """The room ends before its sequences did: say why, at once."""
        cause = job.receiver.cause
        if cause is None:
            raise AssertionError(f"room {job.receiver.id} ended early without a cause")
        if job.finished:
            return
        job.tell_outcome(cause)
        self._metrics.room_failed(cause)
        self._reporter.failed(job.receiver.id, cause)

    def break_off(self, jobs: Iterable[Job], cause: Cause) -> None:
        """The worker ends here and now, in the middle of a turn it may be: tell whoever was not told how its
        room ended, with what ended it before if anything did (`first-cause-wins`)."""
        for job in jobs:
            if not job.outcome_told:
                job.tell_outcome(job.receiver.cause or cause)
