"""Tests that placement finds the best pair and looks at few workers, however many there are."""

import random
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import product
from typing import Any, Final, NoReturn

import pytest

from baton.fleet import placement
from baton.fleet.need import Need
from baton.fleet.pair_health import BROKEN_AFTER
from baton.fleet.placement import LOOKS_MAX, uncached_tokens
from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.fleet.room_table import CLOSING_MS, DELIVERY_MS, OPEN_MS_MAX, OUTCOME_MS
from baton.fleet.side_workers import HOLDERS_MAX
from baton.fleet.worker_record import Worker
from baton.ids import Incarnation, RoomId
from baton.pages.block_hashes import BLOCK_TOKENS, Block, hash_blocks
from baton.rooms.errors import NoCapacity, NoSuchWorker
from baton.rooms.phases import Side
from tests.fleet.test_registry import LOST, apart, facts, registry_of

FEW, MANY = 10, 1_000
SYSTEM: Final = tuple(range(1, 1 + 2 * BLOCK_TOKENS))
"""A beginning that many prompts share."""
WORKER: Final = 1_000_000


def fleet(workers: int, first: int = 1, tokens_max: int = 100_000) -> Registry:
    """Return a registry with `workers` ready workers of each side."""
    return registry_of(
        *(
            replace(
                facts(side, number, tokens_max=tokens_max, rooms_max=99),
                incarnation=Incarnation(number + (WORKER if side is Side.DECODE else 0)),
            )
            for number in range(first, first + workers)
            for side in Side
        )
    )


def prompt(number: int, begin: tuple[int, ...] = (), length: int = 10 * BLOCK_TOKENS) -> tuple[Block, ...]:
    own = range(1_000 * (number + 1), 1_000 * (number + 1) + length - len(begin))
    return hash_blocks((*begin, *own))


def send(stack: Registry, need: Need) -> RoomEntry:
    return stack.open_room("request", stack.place(need), need, 0)


def over(stack: Registry, entry: RoomEntry) -> None:
    stack.end(entry.id, None, 0)
    for side in Side:
        stack.side_retired(entry.id, side)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Record every worker that a placement looks at, and return the growing list."""
    looked: list[Worker] = []

    def counted(worker: Worker, need: Need) -> int:
        looked.append(worker)
        return uncached_tokens(worker, need)

    monkeypatch.setattr(placement, "uncached_tokens", counted)
    return looked


def conversations(number: int) -> Need:
    """Return the need of request `number`. Five requests in a row share a prompt."""
    return Need(1_000, 1_500, prompt(number // 5))


def shared(number: int) -> Need:
    return Need(1_000, 1_500, prompt(number, SYSTEM))


def unknown(number: int) -> Need:
    return Need(1_000, 1_500)


@pytest.mark.parametrize("asked", [conversations, shared, unknown])
def test_a_placement_looks_at_no_more_workers_of_many_than_of_few(
    asked: Callable[[int], Need], looks: list[Worker]
) -> None:
    counts = []
    for workers in (FEW, MANY):
        stack = fleet(workers)
        for number in range(100):
            send(stack, asked(number))
        looks.clear()
        for number in range(100, 150):
            send(stack, asked(number))
        counts.append(len(looks))
    assert counts[1] <= 2 * counts[0], counts


def test_looks_are_bounded_where_every_worker_is_of_another_size(looks: list[Worker]) -> None:
    stack = registry_of(
        *(
            replace(
                facts(side, number, tokens_max=10_000 + 100 * number, rooms_max=99),
                incarnation=Incarnation(number + (WORKER if side is Side.DECODE else 0)),
            )
            for number in range(1, 301)
            for side in Side
        )
    )
    for number in range(300):
        looks.clear()
        send(stack, conversations(number))
        assert len(looks) <= 2 * (LOOKS_MAX + HOLDERS_MAX)


def test_whoever_was_sent_the_beginning_is_found_among_many() -> None:
    stack = fleet(MANY)
    busy = [send(stack, shared(number)) for number in range(2 * HOLDERS_MAX)]
    for entry in busy:
        over(stack, entry)
    first = busy[50]
    again = send(stack, shared(50))
    assert (again.prefill, again.decode) == (first.prefill, first.decode)


def test_whoever_is_full_drained_suspected_or_gone_gets_no_room_and_whoever_is_back_does() -> None:
    stack = registry_of(*(facts(side, number, rooms_max=1) for side in Side for number in (1, 2)))
    need = Need(10, 10)
    first = send(stack, need)
    assert send(stack, need).decode.name == "decode-2"
    with pytest.raises(NoCapacity):
        stack.place(need)
    over(stack, first)
    held = first.decode.incarnation
    assert stack.place(need)[1].facts is first.decode
    stack.suspect(held)
    with pytest.raises(NoCapacity):
        stack.place(need)
    stack.renew(held, 1)
    assert stack.place(need)[1].facts is first.decode
    stack.leave(held, None, 1)
    with pytest.raises(NoCapacity):
        stack.place(need)
    stack.register(first.decode, 1)
    stack.mark_proven(held)
    assert stack.place(need)[1].facts is first.decode
    stack.drain(held)
    with pytest.raises(NoCapacity):
        stack.place(need)


def test_zero_at_idle_nothing_is_kept_of_workers_and_rooms_that_are_gone() -> None:
    stack = fleet(5)
    for number in range(20):
        send(stack, conversations(number))
    left = stack.workers()
    for worker in left[:2]:
        stack.drain(worker.facts.incarnation)
    for worker in left:
        for entry in stack.leave(worker.facts.incarnation, "exited", 0):
            stack.end(entry.id, LOST, 0)
    assert stack.open_count() == 0
    assert not any(stack.phases.values())
    for side in stack.sides.values():
        by_size = (side.known, side.computing, side.ready, side.serving)
        assert not any(len(each) for each in (*by_size, side.open, side.roomy, side.short))
        assert not any((side.joining, side.draining, side.page_sizes))
        assert not any(side.holders_of(conversations(number).blocks) for number in range(20))
    assert stack.orphans(0) == stack.orphans(OPEN_MS_MAX) == stack.overdue(CLOSING_MS) == []
    assert not any(stack.has_open_rooms(worker.facts.incarnation) for worker in left)
    assert stack.engine is None, "no lease"
    for worker in left:
        anew = Incarnation(7 * WORKER + worker.facts.incarnation)
        stack.register(replace(worker.facts, incarnation=anew), 0)  # its name is free


# ---- beside a look at all


def best_of_all(
    stack: Registry, need: Need, avoid: Collection[Incarnation]
) -> tuple[str, str] | type[Exception]:
    """Return the pair that an exhaustive look at all workers and pairs finds, or the error that placement has
    to raise."""
    able: list[list[Worker]] = []
    for side in Side:
        ready = [
            each for each in stack.sides[side].ready if each.facts.tokens_max >= need.positions_on(each.facts)
        ]
        if not ready:
            return NoSuchWorker
        able.append(ready)
    wanted = [[each for each in side if each.facts.incarnation not in avoid] or side for side in able]
    for sides in (wanted, able):
        pairs = [
            (one, other)
            for one, other in product(sides[0], sides[1])
            if not stack.pairs.is_broken((one.facts.incarnation, other.facts.incarnation))
        ]
        if pairs:
            break
    else:
        pairs = list(product(wanted[0], wanted[1]))
    free = [pair for pair in pairs if all(has_space(each, need) for each in pair)]
    if not free:
        return NoCapacity

    pair = min(free, key=lambda pair: sorted((fullness(each, need) for each in pair), reverse=True))
    return pair[0].facts.name, pair[1].facts.name


def fullness(worker: Worker, need: Need) -> tuple[bool, float, int, str]:
    waits, more = not worker.usage.can_start(need.required_free(worker)), uncached_tokens(worker, need)
    return waits, (worker.tokens + more) / worker.facts.tokens_max, more, worker.facts.name


def has_space(worker: Worker, need: Need) -> bool:
    usage = worker.usage
    return worker.has_free_room and (usage.accepts_waiting or usage.can_start(need.required_free(worker)))


def placed(stack: Registry, need: Need, avoid: Collection[Incarnation]) -> tuple[str, str] | type[Exception]:
    try:
        prefill, decode = stack.place(need, avoid)
    except (NoSuchWorker, NoCapacity) as error:
        return NoSuchWorker if isinstance(error, NoSuchWorker) else NoCapacity
    assert prefill is not None
    return prefill.facts.name, decode.facts.name


@pytest.mark.parametrize("seed", range(40))
def test_a_side_of_few_dozen_workers_gets_what_a_look_at_all_comes_to(seed: int) -> None:
    """Caches have several sizes, prompts share beginnings, some pairs do not connect, and some workers are
    avoided."""
    draw = random.Random(seed)
    sizes = draw.choice([(2_000,), (1_000, 2_000, 2_016), tuple(range(1_000, 3_000, 7))])
    stack = registry_of(
        *(
            replace(
                facts(side, number, tokens_max=draw.choice(sizes), rooms_max=draw.choice([2, 5])),
                page_tokens=draw.choice([1, 16]),
            )
            for side in Side
            for number in range(1, draw.choice([3, 8, LOOKS_MAX]) + 1)
        )
    )
    names = [each.facts for each in stack.workers()]
    rooms: list[RoomId] = []
    for _ in range(150):
        tokens = draw.choice([100, 700, 1_500])
        begin = SYSTEM[: draw.choice([0, 64, 128])]
        need = Need(
            tokens, tokens + 100, prompt(draw.randrange(6), begin, tokens), choices=draw.choice([1, 1, 2])
        )
        avoid = {each.incarnation for each in draw.sample(names, draw.choice([0, 1, 3]))}
        want = best_of_all(stack, need, avoid)
        assert placed(stack, need, avoid) == want
        if isinstance(want, tuple):
            rooms.append(stack.open_room("request", stack.place(need, avoid), need, 0).id)
        if draw.random() < 0.6 and rooms:
            over(stack, stack.get(rooms.pop(draw.randrange(len(rooms)))))
        if draw.random() < 0.1:
            one, other = (draw.choice([each for each in names if each.side is side]) for side in Side)
            apart(stack, one, other)
            assert stack.pairs.is_broken((one.incarnation, other.incarnation)), BROKEN_AFTER


@pytest.mark.parametrize("shared", [0, 2 * BLOCK_TOKENS])
@pytest.mark.parametrize("seed", range(3))
def test_of_many_workers_the_best_is_taken_but_for_a_beginning_that_very_many_were_sent(
    seed: int, shared: int
) -> None:
    size = 20_000
    draw, stack = random.Random(seed), fleet(3 * LOOKS_MAX, tokens_max=size)
    rooms: list[RoomEntry] = []
    for _ in range(200):
        need = Need(700, 900, prompt(draw.randrange(30), SYSTEM[:shared], 700))
        for worker in stack.place(need):
            assert worker is not None
            best = min(fullness(each, need) for each in stack.sides[worker.facts.side].ready)
            assert fullness(worker, need)[1] <= best[1] + shared / size
            assert shared or worker.facts.name == best[3]
        rooms.append(send(stack, need))
        if draw.random() < 0.5:
            over(stack, rooms.pop(draw.randrange(len(rooms))))


# ---- rooms


class Unwalked(dict[RoomId, RoomEntry]):
    """A table that raises when it is iterated, so that only single rooms can be looked up."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise AssertionError("somebody walks over all open rooms")

    __iter__ = values = items = keys = _refuse


def test_nothing_that_the_registry_does_walks_over_all_open_rooms() -> None:
    stack = fleet(3)
    stack._open = Unwalked()
    stack._tables = (stack._open, *stack._tables[1:])
    entries = [send(stack, conversations(number)) for number in range(12)]
    stack.mark_delivered(entries[0].id, Side)
    stack.mark_streaming(entries[0].id)
    assert (stack.phases[RoomPhase.STREAMING], stack.phases[RoomPhase.OPEN]) == (1, 11)
    for side in Side:
        stack.side_retired(entries[1].id, side)
    assert stack.orphans(1) == []
    assert stack.orphans(1 + OUTCOME_MS) == [entries[1]]
    assert stack.orphans(DELIVERY_MS) == entries[1:]
    assert stack.orphans(OPEN_MS_MAX) == entries
    stack.end(entries[2].id, LOST, 5)
    assert stack.overdue(5 + CLOSING_MS) == [entries[2]]
    stack.abandon(entries[2].id)
    gone = entries[3].decode
    assert stack.open_rooms_of(gone.incarnation) == [
        each for each in entries if each.decode is gone and each is not entries[2]
    ]
    stack.leave(gone.incarnation, None, 6)
    assert stack.has_open_rooms(gone.incarnation)
    stack.leave(gone.incarnation, "exited", 7)
    stack.register(replace(gone, incarnation=Incarnation(7 * WORKER)), 7)
    assert all(Side.DECODE not in each.waiting_for for each in entries if each.decode is gone)
    stack.expired(8)
    assert stack.of_process(gone.name, gone.pid) == [7 * WORKER]
    assert (stack.all_full, stack.unreachable()) == (False, [])


# ---- reserved


def test_no_starvation_a_worker_is_reserved_for_one_that_connects_to_it_and_has_most_left() -> None:
    stack, need = fleet(3), Need(500, 900)
    prefill, decode = ([each.facts for each in stack.sides[side].ready] for side in Side)
    first = stack.place(need)[1].facts
    send(stack, need)
    assert first == decode[0]
    for each in prefill:
        apart(stack, each, decode[1])
    got = [stack.reserve(need) for _ in range(4)]
    assert got == [decode[2].incarnation, decode[0].incarnation, decode[1].incarnation, None]
    assert stack.all_full
    with pytest.raises(NoCapacity):
        stack.place(need)
    stack.release_reserved()
    assert stack.place(need)[1].facts == decode[2]
    assert stack.reserve(need, before=decode[0].incarnation) == decode[0].incarnation
