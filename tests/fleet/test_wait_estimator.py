"""Expected waits of a line: what counts as a measurement, and what is known before there is one."""

from baton.fleet.fair_queue import FairQueue, QueueKey
from baton.fleet.need import Need
from baton.fleet.wait_estimator import WaitEstimator
from baton.ids import RoomId

TIMEOUT_MS = 60_000
LONG = Need(8192, 8391)
"""A prompt of 8192 tokens and an answer of 200."""
OLD, FIRST = RoomId(1), RoomId(2)


class Line:
    """A stack that streams one old answer, and computes four long prompts, while others wait."""

    def __init__(self, waiting: int) -> None:
        self.expected = WaitEstimator(TIMEOUT_MS, None)
        self.line: FairQueue[int] = FairQueue()
        self.claim = QueueKey(0, b"", self.expected.cost(LONG))
        self.now_ms = 0
        self.expected.opened(OLD, Need(100, 4100))
        self.expected.progressed(OLD, 1)
        for room in range(FIRST, FIRST + 4):
            self.expected.opened(RoomId(room), LONG)
        for number in range(waiting):
            self.expected.enters(self.claim)
            self.line.enter(number, self.claim)
        self.look()

    def look(self) -> None:
        self.expected.look(self.now_ms, len(self.line), self.line.in_class)

    def stream(self, ms: int) -> None:
        """Let the old answer go on at twenty tokens a second."""
        for _ in range(ms // 250):
            self.now_ms += 250
            self.look()
            self.expected.progressed(OLD, 5)

    def is_late(self) -> bool:
        return self.expected.too_late_ms(self.line.in_all(), self.claim) is not None

    def is_refused(self) -> bool:
        return self.expected.too_long_ms(self.line.ahead(self.claim), self.claim) is not None


def test_tokens_of_one_answer_are_no_pace_while_long_prompts_are_computed() -> None:
    line = Line(waiting=4)
    line.stream(4000)
    assert not line.is_late(), "some 80 tokens of the old answer say nothing of prompts"
    assert not line.is_refused()
    line.expected.progressed(FIRST, 1)
    assert not line.is_late(), "four prompts of which each takes four seconds"


def test_a_line_that_is_too_long_is_known_by_the_first_prompt() -> None:
    line = Line(waiting=40)
    line.stream(4000)
    assert not line.is_late()
    line.expected.progressed(FIRST, 1)
    assert line.is_late()
    assert line.is_refused()


def test_a_prompt_that_fails_is_waited_for_no_longer() -> None:
    line = Line(waiting=4)
    line.stream(4000)
    for room in range(FIRST, FIRST + 4):
        line.expected.ended(RoomId(room), is_over=False)
    assert line.is_late(), "twenty tokens a second are all that is computed"
