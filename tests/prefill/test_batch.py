"""Which parts of which prompts go into a step?"""

from hypothesis import given
from hypothesis import strategies as st

from services.prefill.batch import next_parts
from services.prefill.job import Job
from services.rooms.ids import Incarnation, RoomId
from services.rooms.sender import Sender
from tests.prefill import toy
from tests.prefill.bench import deadlines


def job(room: int, prompt: int, computed: int = 0) -> Job:
    asked = toy.request(str(room), range(prompt))
    sender = Sender(RoomId(room), asked.request_id, Incarnation(2), 0, 1, deadlines(), 0)
    return Job(sender, asked, "decode-0", computed=computed)


def test_several_prompts_share_a_step_and_the_last_one_is_cut_to_the_budget() -> None:
    jobs = [job(1, 5), job(2, 3, computed=1), job(3, 9), job(4, 4)]
    parts = next_parts(jobs, 12)
    assert [(part.job.sender.id, part.start, part.stop, part.last) for part in parts] == [
        (1, 0, 5, True),
        (2, 1, 3, True),
        (3, 0, 5, False),
    ]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=8), st.integers(1, 30))
def test_the_oldest_come_first_no_budget_is_left_over_or_exceeded(
    sizes: list[tuple[int, int]], budget: int
) -> None:
    jobs = [job(room, prompt, min(done, prompt)) for room, (prompt, done) in enumerate(sizes, 1)]
    parts = next_parts(jobs, budget)
    wanted = [each for each in jobs if not each.complete]
    assert [part.job for part in parts] == wanted[: len(parts)]
    taken = [part.stop - part.start for part in parts]
    assert all(count > 0 for count in taken)
    assert sum(taken) == min(budget, sum(len(each.request.prompt) - each.computed for each in wanted))
    assert all(part.start == part.job.computed for part in parts)
    assert all(part.last for part in parts[:-1])
