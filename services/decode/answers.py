"""What does a room's caller hear, and the room's timeline with it?

Accepted, then tokens, then one outcome. Only the leader has callers; the other ranks say the same to nobody.
"""

from collections.abc import Iterable

from services.decode.job import Job
from services.rooms.counts import counted
from services.rooms.errors import Cause
from services.rooms.evidence import Finished
from services.rooms.request import Token
from services.runtime.worker_metrics import WorkerMetrics
from services.wire.baton.v1 import inference_pb2
from services.wire.conversions import finish_to_wire, token_to_wire
from services.wire.reporter import Reporter


class Answers:
    def __init__(self, reporter: Reporter, metrics: WorkerMetrics) -> None:
        self._reporter = reporter
        self._metrics = metrics

    def accept(self, job: Job) -> None:
        receiver = job.receiver
        self._reporter.opened(receiver.id, job.request)
        job.reply(inference_pb2.StreamRoomReply(accepted=inference_pb2.Accepted()))
        self._reporter.note(receiver.id, "accepted", f"{counted(receiver.pages_needed, 'page')} needed")

    def emit(self, job: Job, token: Token) -> None:
        """Send the token that was just appended to the output; end the room with its last one."""
        output = job.sequence.output
        finish = job.request.finish_reason(output)
        tokens = inference_pb2.Tokens(
            first=len(output) - 1, tokens=[token_to_wire(token)], finish=finish_to_wire(finish)
        )
        job.reply(inference_pb2.StreamRoomReply(tokens=tokens))
        if finish is not None:
            job.finished = True
            job.receiver.note(Finished())
            job.tell_outcome(None)
            self._reporter.note(
                job.receiver.id, "finished", f"{counted(len(output), 'token')}, {finish.value}"
            )

    def end_early(self, job: Job) -> None:
        """The room ends before its sequence did: say why, at once."""
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
