"""Tests of the estimate of a worker's use: its last report and the rooms placed since."""

import random
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from baton.fleet.need import GROWN_TOKENS, Need
from baton.fleet.placement import LOOKS_MAX
from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomEntry
from baton.fleet.worker_record import Worker, WorkerState
from baton.fleet.worker_usage import WAITING_MIN, WAITING_SHARE, WorkerUsage
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import NoCapacity
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WorkerFacts
from baton.rooms.worker_load import WorkerLoad
from tests.fleet.test_placement import FEW, MANY, fleet
from tests.fleet.test_registry import D1, D2, P1, registry_of

PAGE, PAGES = 16, 64
TOKENS = PAGE * PAGES
NEED = Need(40, 1_000)
BEGINS = 5 * PAGE
"""Positions that a room of NEED begins with: three pages for its 40 tokens, one page more, and one to grow
into."""


def sized(facts: WorkerFacts, pages: int = PAGES) -> WorkerFacts:
    return replace(facts, tokens_max=PAGE * pages, page_tokens=PAGE, rooms_max=200)


P, D, OTHER = sized(P1, 10_000), sized(D1), sized(D2)


def load(free: int = PAGES, **more: int) -> WorkerLoad:
    """`free`: pages; `more`: fields, of one group."""
    asked = more.pop("asked", 0)
    fields = {"waiting": 0, "running": 0, "running_max": 64, "entered": 0, "number": 1} | more
    return WorkerLoad((free,), (asked,), entered=RoomId(fields.pop("entered")), **fields)


def stack_of(*decodes: WorkerFacts) -> Registry:
    return registry_of(P, *decodes, first_room=1)


def sent(stack: Registry, need: Need = NEED) -> RoomEntry:
    return stack.open_room("request", stack.place(need), need, 0)


def brought(stack: Registry, need: Need = NEED) -> RoomEntry:
    """Open a room that the bootstrap delivers to its workers at once."""
    entry = sent(stack, need)
    stack.mark_delivered(entry.id, Side)
    return entry


def decode(stack: Registry, facts: WorkerFacts = D) -> Worker:
    return stack.worker(facts.incarnation)


def filled(stack: Registry) -> list[RoomId]:
    """Place rooms until there is space for no more, and return them."""
    rooms: list[RoomId] = []
    with suppress(NoCapacity):
        while True:
            rooms.append(brought(stack).id)
    return rooms


def names(stack: Registry, count: int, need: Need = NEED) -> list[str]:
    return [brought(stack, need).decode.name for _ in range(count)]


# ---- what is used


def test_what_was_placed_since_a_worker_said_what_it_has_is_subtracted_from_it() -> None:
    stack = stack_of(D)
    stack.update_load(D.incarnation, load(free=20), 0)
    assert names(stack, 4) == [D.name] * 4
    assert decode(stack).usage.left == 0
    stack.update_load(D.incarnation, load(free=10, entered=3, number=2), 0)
    assert decode(stack).usage.left == 10 * PAGE - BEGINS, "room 4 has not come"
    stack.side_retired(RoomId(4), Side.DECODE)
    assert decode(stack).usage.left == 10 * PAGE


def test_what_those_ask_for_that_wait_there_is_not_given_again() -> None:
    stack = stack_of(D, OTHER)
    stack.update_load(D.incarnation, load(free=40, asked=30, waiting=1), 0)
    stack.update_load(OTHER.incarnation, load(free=17), 0)
    assert names(stack, 2) == [OTHER.name] * 2


def test_a_word_that_is_older_than_another_is_not_listened_to() -> None:
    stack = stack_of(D)
    entry = brought(stack)
    assert not stack.update_load(D.incarnation, load(free=10, entered=entry.id, number=7), 0)
    for number in (7, 6):
        assert not stack.update_load(D.incarnation, load(free=60, number=number), 0)
    assert decode(stack).usage.left == 10 * PAGE


def test_who_is_told_is_said_to_have_more_space_only_where_it_has() -> None:
    stack = stack_of(D)
    assert stack.update_load(D.incarnation, load(free=10), 0) is False
    assert stack.update_load(D.incarnation, load(free=9, number=2), 0) is False
    assert stack.update_load(D.incarnation, load(free=11, number=3), 0) is True
    assert stack.update_load(D.incarnation, load(free=11, waiting=WAITING_MIN, number=4), 0) is False
    assert stack.update_load(D.incarnation, load(free=11, waiting=0, number=5), 0) is True, (
        "one more may wait"
    )
    assert stack.update_load(Incarnation(999), load(), 0) is False


def test_a_room_that_its_caller_has_not_brought_is_counted_though_later_ones_have_come() -> None:
    stack = stack_of(D)
    late, soon = sent(stack), brought(stack)
    stack.update_load(D.incarnation, load(free=50, entered=soon.id), 0)
    usage = decode(stack).usage
    assert usage.left == 50 * PAGE - BEGINS
    stack.mark_delivered(late.id, {Side.PREFILL})
    assert usage.left == 50 * PAGE - BEGINS
    stack.mark_delivered(late.id, {Side.DECODE})
    assert usage.left == 50 * PAGE
    never = sent(stack)
    stack.update_load(D.incarnation, load(free=50, entered=never.id, number=2), 0)
    stack.side_retired(never.id, Side.DECODE)
    assert (usage.left, len(usage.unreported)) == (50 * PAGE, 0)


def test_rooms_of_a_bootstrap_that_was_here_before_say_nothing_of_those_of_this_one() -> None:
    stack = stack_of(D)
    brought(stack)
    stack.update_load(D.incarnation, load(free=50, entered=2**61), 0)
    assert decode(stack).usage.left == 50 * PAGE - BEGINS


def test_the_group_that_has_least_decides_and_one_of_other_groups_says_nothing() -> None:
    stack = stack_of(replace(D, group_page_tokens=(PAGE, 2 * PAGE)))
    assert not stack.update_load(D.incarnation, load(free=1), 0)
    assert decode(stack).usage.load is None
    two = replace(load(), free=(40, 30), requested=(0, 12))
    stack.update_load(D.incarnation, two, 0)
    assert decode(stack).usage.left == 18 * 2 * PAGE


def test_a_worker_that_says_nothing_is_counted_by_its_open_rooms_and_asked_for_all_that_it_may_hold() -> None:
    stack = stack_of(replace(D, rooms_max=20))
    assert names(stack, 20) == [D.name] * 20
    assert decode(stack).tokens == 20 * BEGINS > TOKENS
    with pytest.raises(NoCapacity):
        stack.place(NEED)


# ---- who gets it


def test_a_room_goes_where_it_can_begin_and_of_those_where_least_is_used() -> None:
    stack = stack_of(D, OTHER)
    stack.update_load(D.incarnation, load(free=6), 0)
    stack.update_load(OTHER.incarnation, load(free=40, running=5), 0)
    assert names(stack, 7) == [OTHER.name] * 7
    assert names(stack, 1) == [D.name], "it is as full as the other is, and the room can begin there"


def test_bounded_admission_no_more_wait_on_a_worker_than_keep_it_from_idling() -> None:
    for running in (0, 8, 40):
        stack = stack_of(D)
        stack.update_load(D.incarnation, load(free=0, running=running), 0)
        most = max(WAITING_MIN, running // WAITING_SHARE)
        assert names(stack, most) == [D.name] * most
        with pytest.raises(
            NoCapacity, match="every decode worker is full: none has space for 1000 tokens now"
        ):
            stack.place(NEED)
        assert stack.all_full
        stack.update_load(
            D.incarnation, load(running=running, waiting=most, entered=most, number=2, free=0), 0
        )
        assert stack.all_full, "they wait there now"
        stack.update_load(D.incarnation, load(running=running, entered=most, number=3, free=5), 0)
        assert names(stack, 1) == [D.name]


def test_a_room_that_no_row_is_free_for_waits_as_one_that_no_page_is_free_for() -> None:
    stack = stack_of(D, OTHER)
    stack.update_load(D.incarnation, load(running=63), 0)
    stack.update_load(OTHER.incarnation, load(free=20), 0)
    assert names(stack, 1) == [D.name]
    assert names(stack, 4) == [OTHER.name] * 4
    stack.update_load(D.incarnation, load(running=70, entered=1, number=2), 0)
    assert names(stack, 1) == [D.name], "a short queue: six sequences wait for rows"
    assert sorted(names(stack, 1)) == [D.name]


def test_a_request_that_was_retracted_begins_where_its_margin_is_free_too() -> None:
    stack = stack_of(D, OTHER)
    stack.update_load(D.incarnation, load(free=12), 0)
    stack.update_load(OTHER.incarnation, load(free=10, asked=3, waiting=1, running=9), 0)
    again = replace(NEED, margin=7 * PAGE)
    assert brought(stack, again).decode.name == D.name
    stack.update_load(D.incarnation, load(free=11, running=0, waiting=WAITING_MIN, number=2), 0)
    stack.update_load(OTHER.incarnation, load(free=11, running=0, waiting=WAITING_MIN, number=2), 0)
    with pytest.raises(NoCapacity):
        stack.place(again)
    assert stack.place(NEED)


def test_a_request_that_was_retracted_waits_in_no_workers_short_queue() -> None:
    """In such a queue it would begin as soon as its old tokens fit, without its margin."""
    stack = stack_of(D)
    stack.update_load(D.incarnation, load(free=0, running=9), 0)
    with pytest.raises(NoCapacity):
        stack.place(replace(NEED, margin=7 * PAGE))
    assert names(stack, 1) == [D.name]


def test_a_margin_asks_for_no_more_than_the_request_may_ever_take() -> None:
    stack = stack_of(D)
    stack.update_load(D.incarnation, load(), 0)
    again = Need(TOKENS - PAGE, TOKENS, margin=10 * PAGE)
    assert again.required_free(stack.worker(D.incarnation)) == TOKENS
    assert names(stack, 1, again) == [D.name]


def test_a_margin_is_left_to_all_that_grow_beside_the_request_that_comes_back() -> None:
    """The margin counts however little the request takes itself, since other rooms would need its pages at
    once."""
    stack = stack_of(D)
    again = Need(PAGE, 3 * PAGE, margin=2 * PAGE)
    stack.update_load(D.incarnation, load(running=40, free=10), 0)
    least = again.initial_on(D) + GROWN_TOKENS * 40
    assert least - PAGE < again.required_free(stack.worker(D.incarnation)) <= least + GROWN_TOKENS
    with pytest.raises(NoCapacity):
        stack.place(again)
    assert stack.place(replace(again, margin=0))
    stack.update_load(D.incarnation, load(running=40, free=-(-(least + GROWN_TOKENS) // PAGE), number=2), 0)
    assert stack.place(again)


@pytest.mark.parametrize(
    ("need", "positions"),
    [
        (Need(1, 1_000), (1 + 1 + 1) * PAGE),
        (Need(16, 1_000), (1 + 1 + 1) * PAGE),
        (Need(17, 1_000), (2 + 1 + 1) * PAGE),
        (Need(17, 20), 20),
        (Need(17, 1_000, choices=3), (2 + 1 + 3) * PAGE),
    ],
)
def test_a_room_begins_with_what_is_granted_and_with_a_page_for_each_choice(
    need: Need, positions: int
) -> None:
    assert need.initial_on(D) == positions
    assert need.initial_on(P) == need.prompt_tokens


# ---- beside a worker


@dataclass
class WorkerBook:
    """A model of a decode worker's pages: rooms are granted pages in the order in which they come."""

    free: int = PAGES
    rooms: list[RoomId] = field(default_factory=list)
    """Rooms that were not granted pages yet, in order."""
    held: dict[RoomId, int] = field(default_factory=dict)
    told: int = 0
    worst: int = 0
    """Most rooms that waited at a time."""

    def enter(self, room: RoomId) -> None:
        self.rooms.append(room)
        self.grant()

    def grant(self) -> None:
        while self.rooms and self.free - len(self.held) >= 4:
            self.free -= 4
            self.held[self.rooms.pop(0)] = 4
        self.worst = max(self.worst, len(self.rooms))

    def grow(self, draw: random.Random) -> None:
        for room in self.held:
            if self.free and draw.random() < 0.3:
                self.free -= 1
                self.held[room] += 1

    def end(self, room: RoomId) -> None:
        self.free += self.held.pop(room)
        self.grant()

    def load(self) -> WorkerLoad:
        self.told += 1
        return load(
            free=max(self.free - len(self.held), 0),
            asked=4 * len(self.rooms),
            waiting=len(self.rooms),
            running=len(self.held),
            entered=max([*self.rooms, *self.held], default=0),
            number=self.told,
        )


@pytest.mark.parametrize("seed", range(12))
def test_however_late_and_in_whatever_order_words_come_few_wait_on_a_worker_and_nothing_is_lost(
    seed: int,
) -> None:
    """Rooms reach the worker late. Its reports come late, in any order, or not at all."""
    draw, worker, stack = random.Random(seed), WorkerBook(), stack_of(D)
    stack.update_load(D.incarnation, worker.load(), 0)
    coming: list[RoomId] = []
    words: list[WorkerLoad] = []
    for _ in range(400):
        if draw.random() < 0.7:
            with suppress(NoCapacity):
                coming.append(brought(stack).id)
        while coming and draw.random() < 0.6:
            worker.enter(coming.pop(0))
        worker.grow(draw)
        if worker.held and draw.random() < 0.25:
            room = draw.choice(list(worker.held))
            worker.end(room)
            for side in Side:
                stack.side_retired(room, side)
            words.append(worker.load())
        draw.shuffle(words)
        while words and draw.random() < 0.5:
            stack.update_load(D.incarnation, words.pop(), 0)
            words = words[: draw.choice([0, 3])]
    assert worker.worst <= 8 + WAITING_MIN, "those placed since, by a word that is a few steps old"
    for room in coming:
        worker.enter(room)
    stack.update_load(D.incarnation, worker.load(), 0)
    usage = decode(stack).usage
    assert len(usage.unreported) == 0
    assert usage.left == PAGE * (max(worker.free - len(worker.held), 0) - 4 * len(worker.rooms))


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_does_not_idle_while_somebody_waits(seed: int) -> None:
    """Rooms end in a random order, and the pages of each are given to the next waiting room."""
    draw, worker, stack = random.Random(seed), WorkerBook(), stack_of(D)
    stack.update_load(D.incarnation, worker.load(), 0)
    for _ in range(60):
        while placed := filled(stack):
            for room in placed:
                worker.enter(room)
            stack.update_load(D.incarnation, worker.load(), 0)
        assert worker.rooms, "one waits there, so that it begins at once"
        room = draw.choice(list(worker.held))
        worker.end(room)
        for side in Side:
            stack.side_retired(room, side)
        stack.update_load(D.incarnation, worker.load(), 0)


# ---- many workers


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the tokens of each check whether a room could begin on a worker, and return the growing list."""
    looks: list[int] = []
    begins = WorkerUsage.can_start

    def counted(usage: WorkerUsage, tokens: int) -> bool:
        looks.append(tokens)
        return begins(usage, tokens)

    monkeypatch.setattr(WorkerUsage, "can_start", counted)
    return looks


def heard(stack: Registry, said: WorkerLoad) -> None:
    for worker in stack.workers():
        if worker.facts.side is Side.DECODE:
            stack.update_load(worker.facts.incarnation, said, 0)


@pytest.mark.parametrize("free", [0, 1_200])
def test_a_placement_asks_no_more_workers_of_many_than_of_few_be_they_full(
    free: int, asked: list[int]
) -> None:
    counts = []
    for workers in (FEW, MANY):
        stack = fleet(workers)
        heard(stack, load(free=free, waiting=WAITING_MIN))
        asked.clear()
        for _ in range(20):
            with suppress(NoCapacity):
                sent(stack, Need(1_000, 1_500))
        counts.append(len(asked))
    assert counts[1] <= 2 * counts[0] + 40, counts


def test_the_one_that_has_space_is_found_behind_any_number_of_smaller_ones_that_are_less_full() -> None:
    stack = fleet(3 * LOOKS_MAX, tokens_max=10_000)
    heard(stack, load(free=900, waiting=WAITING_MIN))
    large = replace(D1, tokens_max=1_000_000, incarnation=Incarnation(7_777_777), name="large", rooms_max=9)
    stack.register(large, 0)
    stack.mark_proven(large.incarnation)
    stack.update_load(large.incarnation, load(free=5_000, waiting=WAITING_MIN), 0)
    assert sent(stack, Need(1_000, 1_500)).decode.name == "large"
    small = sent(stack, Need(500, 1_500))
    assert small.decode.name != "large"


def test_rooms_that_other_routers_opened_take_places_too() -> None:
    stack = stack_of(replace(D, rooms_max=3))
    sent(stack)
    assert not stack.update_load(D.incarnation, load(number=2, other_rooms=2), 0)
    with pytest.raises(NoCapacity):
        stack.place(NEED)
    assert not stack.update_load(D.incarnation, load(number=1, other_rooms=0), 0), "an older report"
    with pytest.raises(NoCapacity):
        stack.place(NEED)
    assert stack.update_load(D.incarnation, load(number=3, other_rooms=1), 0), "a request may fit now"
    stack.place(NEED)


def test_full_is_no_failure_a_worker_that_refused_a_room_gets_none_before_its_next_report() -> None:
    stack = stack_of(replace(D, rooms_max=3))
    for side, facts in ((Side.PREFILL, P), (Side.DECODE, D)):
        assert not stack.update_load(facts.incarnation, load(number=5), 0)
        refused = sent(stack)
        stack.mark_full(facts.incarnation)
        stack.side_retired(refused.id, side)
        assert stack.all_full
        with pytest.raises(NoCapacity) as lacks:
            stack.place(NEED)
        assert lacks.value.side is side
        assert stack.worker(facts.incarnation).state is WorkerState.READY
        stack.update_load(facts.incarnation, load(number=5), 0)
        stack.renew(facts.incarnation, 0)
        assert stack.all_full, "that is the report that came with the refusal"
        assert stack.update_load(facts.incarnation, load(number=6), 0) or side is Side.PREFILL
        stack.place(NEED)
    stack.mark_full(Incarnation(999))  # it has left


def test_a_full_worker_that_never_reports_a_load_is_tried_again_when_it_renews_its_lease() -> None:
    stack = stack_of(D)
    stack.mark_full(D.incarnation)
    assert stack.all_full
    stack.renew(D.incarnation, 0)
    stack.place(NEED)


def test_full_is_no_failure_a_room_is_adopted_on_a_full_worker_where_it_has_its_place() -> None:
    stack = stack_of(replace(D, rooms_max=2))
    stack.update_load(D.incarnation, load(number=1, other_rooms=2), 0)
    stack.mark_full(D.incarnation)
    adopted = stack.adopt_room(RoomId(77), "request", D.incarnation, P.incarnation, NEED, 0)
    assert adopted is not None
    assert stack.all_full
    stack.update_load(D.incarnation, load(number=2, other_rooms=1), 0)
    assert stack.all_full, "the adopted room has the other place"
    assert stack.update_load(D.incarnation, load(number=3), 0)
    stack.place(NEED)
