"""Tests of the fair queue: turns by class and by tenant, no starvation, and nothing left over."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.fleet.fair_queue import LOWER_PART, NOTHING_QUEUED, QUANTUM, FairQueue, QueueEntry, QueueKey

Line = FairQueue[int]

MANY = settings(max_examples=60, deadline=None)

claims = st.builds(
    QueueKey,
    priority=st.integers(-1, 2),
    tenant=st.sampled_from([b"", b"a", b"b", b"c"]),
    tokens=st.integers(1, 3 * QUANTUM),
    arrived_ms=st.integers(0, 9),
    had_room=st.sampled_from([False, False, False, True]),
)


def line_of(claimed: Sequence[QueueKey]) -> Line:
    line = Line()
    for number, claim in enumerate(claimed):
        line.enter(number, claim)
    return line


def served(line: Line) -> Iterator[QueueEntry[int]]:
    """Take all entries from the queue, and yield them in the order in which they are served."""
    while (one := line.first()) is not None:
        line.take(one)
        yield one


def assert_empty(line: Line) -> None:
    """Check that the queue is empty and has no memory of past entries: it serves the next as a new queue
    does."""
    assert (len(line), line.retried, list(line), line.first()) == (0, 0, [], None)
    assert (line.by_class(), line.in_all()) == (Counter(), NOTHING_QUEUED)
    assert order_of(line) == order_of(Line())


def order_of(line: Line) -> list[int]:
    """Return the order in which requests of two tenants and three classes are served."""
    for number in range(6 * LOWER_PART):
        tenant = (b"a", b"b")[number % 2]
        line.enter(number, QueueKey((0, 0, 0, 1, 0, 2)[number % 6], tenant, QUANTUM, had_room=number == 9))
    return [one.waiting for one in served(line)]


@MANY
@given(st.lists(claims, max_size=40))
def test_all_are_served_those_that_had_a_room_first_and_the_oldest_of_a_tenant_before_its_next(
    claimed: list[QueueKey],
) -> None:
    line = line_of(claimed)
    order = list(served(line))
    assert sorted(one.waiting for one in order) == list(range(len(claimed)))
    again = [one for one in order if one.claim.had_room]
    assert order[: len(again)] == again == sorted(again, key=lambda one: one.age)
    of_tenant: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for one in order[len(again) :]:
        of_tenant[one.claim.priority, one.claim.tenant].append(one.waiting)
    assert all(numbers == sorted(numbers) for numbers in of_tenant.values())
    assert_empty(line)


@MANY
@given(st.lists(st.integers(1, 3 * QUANTUM), min_size=1, max_size=30), st.integers(1, 2 * QUANTUM))
def test_no_starvation_a_class_that_others_pass_by_has_a_part_of_their_tokens_and_no_more(
    above: list[int], tokens: int
) -> None:
    line = Line()
    for each in above * LOWER_PART:
        line.enter(0, QueueKey(0, tokens=each))
    for _ in range(len(above) * LOWER_PART):
        line.enter(1, QueueKey(1, tokens=tokens))
    passed = had = 0
    largest = max(above)
    for one in served(line):
        if one.claim.priority == 1:
            had += tokens
        else:
            passed += one.claim.tokens
        if not (line.in_class(0) and line.in_class(1)):
            break
        assert had <= passed / LOWER_PART <= had + tokens + largest / LOWER_PART


@MANY
@given(st.integers(2, 6), st.integers(1, 3 * QUANTUM))
def test_no_starvation_each_of_several_classes_gets_its_turn_though_one_above_never_ends(
    classes: int, tokens: int
) -> None:
    line = Line()
    for priority in range(1, classes):
        for _ in range(3):
            line.enter(priority, QueueKey(priority, tokens=tokens))
    rooms: Counter[int] = Counter()
    for _ in range((LOWER_PART + 1) * classes):
        line.enter(0, QueueKey(0, tokens=tokens))
        one = line.first()
        assert one is not None
        rooms[one.claim.priority] += 1
        line.take(one)
    assert all(rooms[priority] >= 1 for priority in range(1, classes))
    assert rooms[0] >= LOWER_PART * (classes - 1), "and those above have the most by far"


@MANY
@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.integers(1, 4 * QUANTUM)), max_size=80))
def test_two_tenants_that_both_wait_get_equal_tokens_but_for_a_request_of_each(
    asked: list[tuple[bytes, int]],
) -> None:
    line = line_of([QueueKey(0, tenant, tokens) for tenant, tokens in asked])
    left = Counter(tenant for tenant, _ in asked)
    had: Counter[bytes] = Counter()
    largest = max((tokens for _, tokens in asked), default=0)
    for one in served(line):
        tenant = one.claim.tenant
        had[tenant] += one.claim.tokens
        left[tenant] -= 1
        if not all(left[each] for each in (b"a", b"b")):
            break
        assert abs(had[b"a"] - had[b"b"]) <= QUANTUM + largest


@MANY
@given(st.integers(1, 5), st.integers(1, 5))
def test_no_starvation_no_number_of_new_tenants_keeps_one_from_its_turn(laps: int, present: int) -> None:
    """Each new tenant asks for little, and is gone once it is served."""
    line = Line()
    for number in range(present):
        line.enter(number, QueueKey(0, f"early-{number}".encode(), QUANTUM))
    patient = line.enter(-1, QueueKey(0, b"patient", laps * QUANTUM))
    came = 0
    while patient.is_queued:
        for _ in range(2):  # twice as many as are served
            came += 1
            line.enter(came, QueueKey(0, f"late-{came}".encode(), 1))
        one = line.first()
        assert one is not None
        line.take(one)
        assert came <= 2 ** (laps + 1) * (present + 2), "each lap has at most those that came during the last"


@MANY
@given(st.lists(claims, max_size=40), st.data())
def test_who_is_passed_over_keeps_its_turn_and_holds_up_nobody(
    claimed: list[QueueKey], data: st.DataObject
) -> None:
    line, undisturbed = line_of(claimed), line_of(claimed)
    for expected in served(undisturbed):
        looked_at = set()
        for _ in range(data.draw(st.integers(0, 3))):
            if (one := line.first()) is not None:
                looked_at.add(one.number)
                line.skip(one)
        after = line.first()
        assert after is None or after.number not in looked_at
        assert (after is None) == (len(looked_at) == len(line))
        line.end_scan()
        first = line.first()
        assert first is not None
        assert first.waiting == expected.waiting
        line.take(first)
    assert_empty(line)


@MANY
@given(st.lists(claims, max_size=40), st.data())
def test_whoever_leaves_leaves_once_and_nothing_of_it_stays(
    claimed: list[QueueKey], data: st.DataObject
) -> None:
    line = Line()
    waiting = [line.enter(number, claim) for number, claim in enumerate(claimed)]
    while len(line):
        one = data.draw(st.sampled_from(waiting))
        if data.draw(st.booleans()) and (first := line.first()) is not None:
            line.skip(first)
        assert line.leave(one)
        waiting.remove(one)
        assert not line.leave(one), "it is gone"
        if data.draw(st.booleans()):
            line.end_scan()
        assert len(line) == len(waiting)
    line.end_scan()
    assert_empty(line)


@MANY
@given(st.lists(claims, max_size=60))
def test_of_one_tenant_it_is_known_how_many_are_served_before_a_newcomer(claimed: list[QueueKey]) -> None:
    """No lower class waits, which would get its share of the turns."""
    line = line_of([QueueKey(0, b"", each.tokens, each.arrived_ms, each.had_room) for each in claimed])
    ahead = line.ahead(QueueKey(0))
    newcomer = line.enter(-1, QueueKey(0))
    order = list(served(line))
    assert ahead.tokens == sum(one.claim.tokens for one in order[: ahead.all])
    assert order.index(newcomer) == ahead.all == ahead.in_class + sum(one.claim.had_room for one in order)


def test_of_several_tenants_a_newcomer_is_told_of_those_that_its_share_lets_pass() -> None:
    line = line_of([QueueKey(0, b"many", QUANTUM)] * 100)
    assert line.ahead(QueueKey(0, b"few", QUANTUM)).all == 1
    assert line.ahead(QueueKey(0, b"many", QUANTUM)).all == 100
    assert line.ahead(QueueKey(1, b"few", QUANTUM)).all == 100
