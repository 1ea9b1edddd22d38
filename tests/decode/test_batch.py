"""Which sequences take part in the next step?"""

from services.decode.batch import next_batch
from services.decode.job import Job
from services.rooms.ids import Incarnation, RoomId
from services.rooms.receiver import Receiver
from services.wire.baton.v1 import rooms_pb2
from tests.prefill import toy
from tests.prefill.bench import deadlines


def test_the_oldest_run_and_the_others_wait_in_their_order() -> None:
    jobs = [
        Job(
            Receiver(RoomId(room), str(room), Incarnation(1), 0, 1, deadlines(), 0, pages_expected=1),
            toy.request(str(room), (1,)),
            rooms_pb2.Peer(),
        )
        for room in range(1, 6)
    ]
    assert next_batch(jobs, 3) == jobs[:3]
    assert next_batch(jobs[1:], 3) == jobs[1:4]
    assert next_batch(jobs, 9) == jobs
    assert next_batch([], 3) == []
