"""Which sequences take part in the next step?"""

from services.decode.batch import how_many, next_batch, unfinished
from services.decode.job import Choice, Job
from services.ids import Incarnation, RoomId
from services.rooms.choice_pages import ChoicePages
from services.rooms.phases import Phase
from services.rooms.receiver import Receiver
from services.wire.baton.v1 import rooms_pb2
from tests.prefill import toy
from tests.prefill.bench import deadlines


def _job(
    room: int,
    phase: Phase = Phase.SUCCESS,
    *,
    finished: bool = False,
    stopping: bool = False,
    choices: int = 1,
    prompt: int = 1,
) -> Job:
    """Admitted, if it is, and nothing was drawn for its further choices."""
    receiver = Receiver(RoomId(room), str(room), Incarnation(1), 0, 1, deadlines(), 0, pages_expected=1)
    receiver.phase, receiver.stopping = phase, stopping
    asked = toy.request(str(room), (1,) * prompt, max_tokens=9, further_seeds=(7,) * (choices - 1))
    division = ChoicePages(prompt, asked.tokens_max, choices, toy.PAGE_TOKENS)
    job = Job(receiver, asked, rooms_pb2.Peer(), division)
    job.finished = finished
    job.choices[0].sequence.output.append(1)
    for choice in job.choices:
        choice.computed = division.shared_tokens if choice.place else prompt
    return job


def _drawn(job: Job) -> None:
    for choice in job.choices[1:]:
        choice.computed = choice.sequence.length
        choice.sequence.output.append(1)


def _batch(jobs: list[Job], max_running: int) -> list[tuple[int, int]]:
    return [(job.receiver.id, choice.place) for job, choice in next_batch(jobs, max_running)]


def test_the_oldest_run_and_the_others_wait_in_their_order() -> None:
    jobs = [_job(room) for room in range(1, 6)]
    assert [job for job, _ in next_batch(jobs, 3)] == jobs[:3]
    assert [job for job, _ in next_batch(jobs[1:], 3)] == jobs[1:4]
    assert [job for job, _ in next_batch(jobs, 9)] == jobs
    assert next_batch([], 3) == []


def test_none_takes_part_that_is_not_admitted_or_has_ended() -> None:
    others = [_job(room, phase) for room, phase in enumerate(Phase, 10) if phase is not Phase.SUCCESS]
    goes_on = _job(3)
    jobs = [*others, _job(1, finished=True), _job(2, stopping=True), goes_on]
    assert [job for job, _ in unfinished(jobs)] == [goes_on]
    assert [job for job, _ in next_batch(jobs, 1)] == [goes_on], "nor do they take a place"


def test_sequences_are_counted_and_a_rooms_choices_that_fit_run_in_their_order() -> None:
    jobs = [_job(1, choices=3), _job(2), _job(3)]
    _drawn(jobs[0])
    assert _batch(jobs, 2) == [(1, 0), (1, 1)]
    assert _batch(jobs, 4) == [(1, 0), (1, 1), (1, 2), (2, 0)]
    jobs[0].ends.end(1)
    assert _batch(jobs, 4) == [(1, 0), (1, 2), (2, 0), (3, 0)]
    assert how_many(jobs) == len(unfinished(jobs)) == 4


def test_so_many_choices_begin_in_a_step_that_it_computes_no_more_tokens_than_a_full_batch() -> None:
    jobs = [_job(1), _job(2, choices=4, prompt=7), _job(3)]
    assert [_tokens(choice) for _, choice in unfinished(jobs)] == [1, 1, 3, 3, 3, 1]
    assert _batch(jobs, 9) == [(1, 0), (2, 0), (2, 1), (2, 2), (3, 0)]
    _drawn(jobs[1])
    assert _batch(jobs, 9) == [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0)]


def test_one_begins_whatever_else_runs() -> None:
    jobs = [_job(1), _job(2, choices=3, prompt=8)]
    assert [_tokens(choice) for _, choice in unfinished(jobs)] == [1, 1, 4, 4]
    assert _batch(jobs, 4) == [(1, 0), (2, 0), (2, 1)]


def _tokens(choice: Choice) -> int:
    row = choice.row
    return row.stop - row.start
