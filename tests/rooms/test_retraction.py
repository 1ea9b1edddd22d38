"""Tests of the choice of rooms that get the next step's pages and of those that are retracted."""

from hypothesis import given
from hypothesis import strategies as st

from baton.ids import PageCounts, RoomId
from baton.rooms.retraction import Age, RunningRoom, Want, growth


def age(arrived_ms: int, room: int) -> Age:
    return arrived_ms, RoomId(room)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Want], list[RunningRoom], PageCounts, PageCounts]:
    """Draw a case of one or two KV groups. Some of its rooms arrived at the same time."""
    groups = draw(st.integers(1, 2))
    counts = st.tuples(*[st.integers(0, 4)] * groups)
    ages = [age(draw(st.integers(0, 3)), room) for room in range(draw(st.integers(1, 6)))]
    running = [RunningRoom(each, draw(counts)) for each in ages]
    wants = [Want(draw(st.sampled_from(ages)), draw(counts)) for _ in range(draw(st.integers(1, 8)))]
    return wants, running, draw(counts), draw(counts)


@given(cases())
def test_oldest_goes_on_and_the_youngest_make_space(
    case: tuple[list[Want], list[RunningRoom], PageCounts, PageCounts],
) -> None:
    wants, running, free, coming = case
    grown, retracted, _ = growth(wants, running, free, coming)
    youngest_first = [room.age[1] for room in sorted(running, reverse=True)]
    assert list(retracted) == youngest_first[: len(retracted)]
    assert youngest_first[-1] not in retracted
    for group, count in enumerate(free):
        assert sum(wants[place].pages[group] for place in grown) <= count
    assert not {wants[place].age[1] for place in grown} & set(retracted)
    left = [place for place, want in enumerate(wants) if want.age[1] not in retracted]
    if grown:
        last = max(wants[place].age for place in grown)
        assert all(place in grown for place in left if wants[place].age < last), "none is overtaken"


@given(cases())
def test_no_more_rooms_make_space_than_must(
    case: tuple[list[Want], list[RunningRoom], PageCounts, PageCounts],
) -> None:
    wants, running, free, coming = case
    retracted = growth(wants, running, free, coming).retracted
    gives = {room.age[1]: room.pages for room in running}

    def suffices(gone: list[RoomId]) -> bool:
        return all(
            sum(want.pages[group] for want in wants if want.age[1] not in gone)
            <= free[group] + coming[group] + sum(gives[room][group] for room in gone)
            for group in range(len(free))
        )

    assert suffices(list(retracted)) or len(retracted) == len(running) - 1
    assert not retracted or not suffices(list(retracted[:-1]))


def test_what_is_about_to_be_given_back_is_waited_for() -> None:
    running = [RunningRoom(age(1, 1), (3,)), RunningRoom(age(2, 2), (3,))]
    assert growth([Want(age(1, 1), (1,))], running, (0,), (1,)) == ([], [], False)
    assert growth([Want(age(1, 1), (1,))], running, (0,), (0,)) == ([], [2], False)


def test_age_is_when_the_request_came_and_not_when_its_room_was_opened() -> None:
    running = [RunningRoom(age(9, 1), (3,)), RunningRoom(age(1, 7), (3,))]
    assert growth([Want(age(9, 1), (1,))], running, (0,), (0,)).retracted == [1]


def test_a_room_that_no_other_could_go_on_for_makes_space_only_where_nobody_else_is_left() -> None:
    running = [
        RunningRoom(age(1, 1), (3,)),
        RunningRoom(age(2, 2), (3,)),
        RunningRoom(age(3, 3), (3,), stays=True),
    ]
    assert growth([Want(age(1, 1), (1,))], running, (0,), (0,)).retracted == [2]
    assert growth([Want(age(1, 1), (4,))], running, (0,), (0,)).retracted == [2, 3]
    spared = [RunningRoom(each.age, each.pages, stays=not each.stays) for each in running]
    assert growth([Want(age(1, 1), (9,))], spared, (0,), (0,)).retracted == [3, 2], "never the oldest"
