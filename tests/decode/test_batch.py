"""Which sequences take part in the next step?"""

from services.decode.batch import next_batch, unfinished
from services.decode.job import Job
from services.rooms.ids import Incarnation, RoomId
from services.rooms.phases import Phase
from services.rooms.receiver import Receiver
from services.wire.baton.v1 import rooms_pb2
from tests.prefill import toy
from tests.prefill.bench import deadlines


def _job(room: int, phase: Phase = Phase.SUCCESS, *, finished: bool = False, stopping: bool = False) -> Job:
    receiver = Receiver(RoomId(room), str(room), Incarnation(1), 0, 1, deadlines(), 0, pages_expected=1)
    receiver.phase, receiver.stopping = phase, stopping
    job = Job(receiver, toy.request(str(room), (1,)), rooms_pb2.Peer())
    job.finished = finished
    return job


def test_the_oldest_run_and_the_others_wait_in_their_order() -> None:
    jobs = [_job(room) for room in range(1, 6)]
    assert next_batch(jobs, 3) == jobs[:3]
    assert next_batch(jobs[1:], 3) == jobs[1:4]
    assert next_batch(jobs, 9) == jobs
    assert next_batch([], 3) == []


def test_none_takes_part_that_is_not_admitted_or_has_ended() -> None:
    others = [_job(room, phase) for room, phase in enumerate(Phase, 10) if phase is not Phase.SUCCESS]
    goes_on = _job(3)
    jobs = [*others, _job(1, finished=True), _job(2, stopping=True), goes_on]
    assert unfinished(jobs) == [goes_on]
    assert next_batch(jobs, 1) == [goes_on], "nor do they take a place"
