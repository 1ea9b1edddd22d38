"""Tests of requests with several choices: they share a room, end one by one, and go on in further rooms."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest

from baton.api.backend import Hangup, NoWorker, RoomFailed
from baton.bootstrap.request_stream import RequestStream
from baton.bootstrap.room_messages import room_to_wire
from baton.fleet.need import Need
from baton.rooms.choice_pages import ChoicePages
from baton.rooms.errors import Cause, Reason
from baton.rooms.request import Request, Sampling
from tests.bootstrap.scripted import (
    LENGTH,
    D,
    House,
    P,
    Step,
    accepted,
    ended,
    first,
    house,
    tokens,
)
from tests.bootstrap.test_request_stream import PairHealth, two_pairs
from tests.patience import PATIENCE_S
from tests.wire.servers import until

DRAWN = {5: (7, 8, 9, 10), 6: (7, 8, 20, 21), 7: (7, 30, 31, 32), 8: (40, 41, 42, 43)}
"""Tokens that a scripted worker draws, by seed."""
WHOLE = {place: (list(drawn), "length") for place, drawn in enumerate(DRAWN.values())}
LOST = Cause(Reason.DECODE_LOST, "as it happens")


def several(count: int = 4) -> Request:
    seed, *further = list(DRAWN)[:count]
    return Request("request-1", (1, 2, 3), 4, sampling=Sampling(seed=seed), further_seeds=tuple(further))


def seeds(request: Request) -> tuple[int, ...]:
    return (request.sampling.seed, *request.further_seeds)


def prefills(request: Request) -> list[Step]:
    at = len(request.output)
    finish = LENGTH if at + 1 == request.max_tokens else None
    return [accepted(P), first(DRAWN[request.sampling.seed][at], finish), ended(P)]


def decodes(request: Request) -> list[Step]:
    """Script of an honest worker, in which each choice goes on behind the output that they share."""
    at = len(request.output)
    drawn = [tokens(at, DRAWN[seed][at:], LENGTH, place) for place, seed in enumerate(seeds(request))]
    return [accepted(D), *reversed(drawn), ended(D)]


def fails(*before: Step) -> list[Step]:
    return [accepted(D), *before, ended(D, LOST)]


def in_turn(*scripts: Sequence[Step] | Callable[[Request], Sequence[Step]]) -> Callable[..., Sequence[Step]]:
    """Return a script that plays `scripts` for the first rooms, one each, and an honest worker's for later
    ones."""
    waiting = list(scripts)

    def script(request: Request) -> Sequence[Step]:
        each = waiting.pop(0) if waiting else decodes
        return each(request) if callable(each) else each

    return script


Heard = dict[int, tuple[list[int], str]]


async def read(stream: RequestStream, count: int) -> Heard:
    """Read the stream to its end. Returns each choice's tokens and finish reason, by choice index."""
    drawn: dict[int, list[int]] = {place: [] for place in range(count)}
    heard: Heard = {}
    async with asyncio.timeout(PATIENCE_S):
        while len(heard) < count:
            batch = await stream.next()
            assert batch.choice not in heard, "nothing follows a choice's end"
            drawn[batch.choice] += [token.id for token in batch.tokens]
            if batch.finish is not None:
                heard[batch.choice] = drawn[batch.choice], batch.finish.value
    return heard


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house() as made:
        made.prefill.choose, made.decode.choose = prefills, decodes
        yield made


@pytest.fixture
async def pairs() -> AsyncIterator[PairHealth]:
    async with two_pairs() as made:
        for worker in made.workers:
            worker.choose = prefills if worker.side is P else decodes
        yield made


def both(pairs: PairHealth) -> list[Request]:
    """Return the requests that decode got after the first room."""
    return sorted(
        [*pairs.decode.asked[1:], *pairs.decode_1.asked], key=lambda each: (each.output, seeds(each))
    )


async def test_one_room_draws_all_choices_and_is_answered_when_the_last_has_ended(at: House) -> None:
    stream = await at.backend.generate(several())
    assert await read(stream, 4) == WHOLE
    assert at.entry().cause is None
    events = {event.name: event.detail for event in at.entry().events}
    assert events["opened"].endswith(", 4 choices")
    assert events["answered"] == "16 tokens of 4 choices passed on"
    assert room_to_wire(at.entry(), events=False).choices == 4
    at.retired()
    await at.at_rest()
    asks = [replace(several(), carried_tokens_max=at.prefill.tokens_max)]
    assert at.prefill.asked == at.decode.asked == asks, "whichever of them is heard first"


async def test_a_reader_ends_one_choice_and_the_others_go_on(at: House) -> None:
    going_on = asyncio.Event()
    at.decode.choose = None
    at.decode.script = [
        accepted(D),
        tokens(0, DRAWN[6][:1], None, 1),
        going_on,
        tokens(1, DRAWN[6][1:], LENGTH, 1),
        tokens(0, DRAWN[5], LENGTH, 0),
        ended(D),
    ]
    stream = await at.backend.generate(several(2))
    while (await stream.next()).choice != 1:
        pass
    stream.end_choice(1)
    await until(lambda: at.decode.enough == [(1, 1)])
    going_on.set()
    last = await stream.next()
    while last.finish is None:
        assert last.choice == 0
        last = await stream.next()
    assert (last.choice, last.tokens[-1].id, last.finish) == (0, 10, LENGTH)
    at.retired()
    await at.at_rest()


async def test_the_last_choice_that_a_reader_ends_ends_the_room_on_both_sides(at: House) -> None:
    at.decode.choose = None
    at.decode.script = [accepted(D), tokens(0, [7], None, 1)]
    stream = await at.backend.generate(several(2))
    await stream.next()
    await stream.next()
    stream.end_choice(1)
    stream.end_choice(0)
    assert at.entry().cause is None
    await until(lambda: at.decode.cancels.get(1) == "answered")
    at.decode.cancelled.set()
    at.retired()
    await at.at_rest()


async def test_choices_of_one_output_go_on_in_one_room_and_others_in_theirs(pairs: PairHealth) -> None:
    """The tokens are those of an undisturbed run. The choice that had ended is not drawn again."""
    pairs.decode.choose = in_turn(
        fails(
            tokens(0, DRAWN[5][:2], None, 0),
            tokens(0, DRAWN[6][:2], None, 1),
            tokens(0, DRAWN[7][:3], None, 2),
            tokens(0, DRAWN[8], LENGTH, 3),
        )
    )
    stream = await pairs.backend.generate(several())
    assert await read(stream, 4) == WHOLE
    alike, alone = both(pairs)
    assert (alike.output, seeds(alike)) == (DRAWN[5][:2], (5, 6))
    assert (alone.output, seeds(alone)) == (DRAWN[7][:3], (7,))
    assert [pairs.entry(room).retry_of for room in (3, 4)] == [2, 2]
    assert [pairs.entry(room).choices for room in (2, 3, 4)] in ([4, 2, 1], [4, 1, 2])
    await pairs.all_at_rest(2, 3, 4)


async def test_choices_that_are_alike_stay_in_one_room(pairs: PairHealth) -> None:
    pairs.decode.choose = in_turn(fails(*(tokens(0, [7], None, place) for place in range(3))))
    stream = await pairs.backend.generate(several(3))
    assert await read(stream, 3) == {place: WHOLE[place] for place in range(3)}
    assert [(each.output, seeds(each)) for each in both(pairs)] == [((7,), (5, 6, 7))]
    await pairs.all_at_rest(2, 3)


async def test_rooms_that_follow_a_room_are_followed_by_others(pairs: PairHealth) -> None:
    """Choices that went on together separate in the second room. The third room is for these alone."""
    pairs.decode.choose = in_turn(
        fails(*(tokens(0, DRAWN[seed][:1], None, place) for place, seed in enumerate(DRAWN)))
    )

    def second(request: Request) -> list[Step]:
        if request.output != (7,):
            return decodes(request)
        drawn = (tokens(1, DRAWN[seed][1:3], None, place) for place, seed in enumerate(seeds(request)))
        return fails(*drawn)

    pairs.decode_1.choose = second
    stream = await pairs.backend.generate(several())
    assert await read(stream, 4) == WHOLE
    asked = [(each.output, seeds(each)) for each in both(pairs)]
    assert asked == [
        ((7,), (5, 6, 7)),
        ((7, 8, 9), (5,)),
        ((7, 8, 20), (6,)),
        ((7, 30, 31), (7,)),
        ((40,), (8,)),
    ]
    await pairs.all_at_rest(*range(2, 8))


async def test_a_choice_that_a_reader_ended_is_not_drawn_again(pairs: PairHealth) -> None:
    failing = asyncio.Event()
    drawn = [tokens(0, DRAWN[seed][:1], None, place) for place, seed in enumerate(DRAWN)]
    pairs.decode.choose = in_turn([accepted(D), *drawn, failing, ended(D, LOST)])
    stream = await pairs.backend.generate(several())
    for _ in range(4):
        await stream.next()
    stream.end_choice(0)
    stream.end_choice(3)
    failing.set()
    heard: dict[int, list[int]] = {1: [], 2: []}
    finished = 0
    while finished < 2:
        batch = await stream.next()
        heard[batch.choice] += [token.id for token in batch.tokens]
        finished += batch.finish is not None
    assert heard == {1: list(DRAWN[6][1:]), 2: list(DRAWN[7][1:])}
    assert [(each.output, seeds(each)) for each in both(pairs)] == [((7,), (6, 7))]
    await pairs.all_at_rest(2, 3)


async def test_a_reader_ends_a_choice_that_has_a_room_of_its_own(pairs: PairHealth) -> None:
    pairs.decode.choose = in_turn(
        fails(*(tokens(0, DRAWN[seed][:1], None, place) for place, seed in enumerate(DRAWN)))
    )
    going_on = asyncio.Event()

    def second(request: Request) -> list[Step]:
        if 8 in seeds(request):
            return [accepted(D), tokens(1, [41])]
        return [accepted(D), going_on, *decodes(request)[1:]]

    pairs.decode_1.choose = second
    stream = await pairs.backend.generate(several())
    while True:
        batch = await stream.next()
        if batch.choice == 3 and batch.tokens[-1].id == 41:
            break
    stream.end_choice(3)
    (room,) = [each for each in (3, 4) if pairs.entry(each).choices == 1]
    await until(lambda: pairs.decode_1.cancels.get(room) == "answered")
    going_on.set()
    finished: set[int] = set()
    while len(finished) < 3:
        batch = await stream.next()
        assert batch.choice != 3
        finished |= {batch.choice} if batch.finish else set()
    await pairs.all_at_rest(2, 3, 4)


async def test_a_choice_that_is_ended_while_its_room_is_waited_for_is_not_drawn(pairs: PairHealth) -> None:
    """The cases are one of two choices that wait for a room together, and a choice that waits alone and gets
    none."""
    pairs.decode.choose = in_turn(
        fails(*(tokens(0, DRAWN[seed][:1], None, place) for place, seed in enumerate(DRAWN)))
    )
    stream = await pairs.backend.generate(several())
    for _ in range(4):
        await stream.next()
    going_on = asyncio.ensure_future(stream.next())
    await until(lambda: pairs.admission.retrying[pairs.entry(2).id] == 2)
    stream.end_choice(1)
    stream.end_choice(3)
    finished = 0
    while finished < 2:
        batch = await going_on
        assert batch.choice in (0, 2)
        finished += batch.finish is not None
        if finished < 2:
            going_on = asyncio.ensure_future(stream.next())
    assert [seeds(each) for each in both(pairs)] == [(5, 7)]
    told = [event.detail for event in pairs.entry(2).events if event.name == "given up"]
    assert told == ["its reader had enough of it while it waited for another room"]
    await pairs.all_at_rest(2, 3)


async def test_a_room_that_finally_fails_ends_the_request_and_its_other_rooms(pairs: PairHealth) -> None:
    pairs.decode.choose = in_turn(fails(tokens(0, DRAWN[5][:1]), tokens(0, DRAWN[8][:1], None, 1)))
    lasting = Cause(Reason.GRAMMAR_FAILED, "no token is allowed")

    def second(request: Request) -> list[Step]:
        if request.output == (40,):
            return [accepted(D), ended(D, lasting)]
        return [accepted(D)]

    pairs.decode_1.choose = second
    request = Request("request-1", (1, 2, 3), 4, sampling=Sampling(seed=5), further_seeds=(8,))
    stream = await pairs.backend.generate(request)
    with pytest.raises(RoomFailed) as failed:
        await read(stream, 2)
    assert failed.value.reason is Reason.GRAMMAR_FAILED
    (other,) = [each for each in (3, 4) if (cause := pairs.entry(each).cause) and cause != lasting]
    assert pairs.entry(other).cause == Cause(Reason.CANCELLED, "another part of the request failed")
    await until(lambda: pairs.decode_1.cancels.get(other) == "cancelled")
    await pairs.all_at_rest(2, 3, 4)


@pytest.mark.parametrize("when", ["in the pause", "while they are drawn"])
async def test_a_client_that_hangs_up_ends_all_rooms(pairs: PairHealth, when: str) -> None:
    pairs.decode.choose = in_turn(fails(tokens(0, DRAWN[5][:1]), tokens(0, DRAWN[8][:1], None, 3)))
    pairs.decode_1.choose = lambda _: [accepted(D)]
    pairs.prefill.choose = lambda request: [accepted(P), first(7)] if not request.output else [accepted(P)]
    pairs.prefill_1.choose = lambda _: [accepted(P)]
    stream = await pairs.backend.generate(several())
    reading = asyncio.ensure_future(read(stream, 4))
    if when == "in the pause":
        await until(lambda: pairs.admission.retrying[pairs.entry(2).id] == 3)
    else:
        await until(lambda: len(pairs.decode_1.called) == 3)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await stream.hang_up(Hangup.CLIENT_GONE)
    opened = [entry.id for entry in pairs.registry.find("request-1")]
    assert all(pairs.entry(room).cause is not None for room in opened)
    assert opened == [2] if when == "in the pause" else len(opened) == 4
    assert not pairs.admission.retrying
    await pairs.all_at_rest(*opened)


async def test_a_room_takes_the_pages_of_all_its_choices(at: House) -> None:
    """With 16 tokens per page, a prompt of 40 fills two pages, which all choices share. Each choice may have
    two more, and begins with one."""
    at.prefill.choose, at.decode.choose = (lambda _: [accepted(P)]), (lambda _: [accepted(D)])
    need = Need(40, 60, choices=3)
    assert need.positions_on_decode(1) == 60 + 2 * (60 - 39)
    assert need.positions_on_decode(16) == 16 * (4 + 2 * (4 - 2))
    request = Request("request-1", tuple(range(40)), 21, further_seeds=(1, 2))
    stream = await at.backend.generate(request)
    assert at.entry().tokens == need.initial_on_decode(1) == 40 + 1 + 3
    await stream.hang_up(Hangup.CLIENT_GONE)
    await until(lambda: bool(at.prefill.cancels and at.decode.cancels))
    for worker in (at.prefill, at.decode):
        worker.cancelled.set()
    at.retired()
    with pytest.raises(NoWorker, match=r"no decode worker can hold 128 times 60 tokens"):
        await at.backend.generate(Request("2", tuple(range(40)), 21, further_seeds=(1,) * 127))
    await at.at_rest()


def test_what_the_registry_counts_is_what_decode_reserves() -> None:
    for page in (1, 4, 16):
        for known in (1, 4, 5, 16, 40):
            for more in (0, 1, 7, 30):
                for choices in (1, 2, 5):
                    (reserved,) = ChoicePages(known, known + more, choices, (page,)).needed
                    taken = Need(known, known + more, choices=choices).positions_on_decode(page)
                    assert reserved == -(-taken // page)
