"""The product's registry, filled with workers and rooms, and its measurements."""

import statistics
from collections.abc import Sequence
from typing import Any, Final

from baton.fleet.need import Need
from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomEntry
from baton.ids import Incarnation, RoomId
from baton.pages.block_hashes import BLOCK_TOKENS, Block, hash_blocks
from baton.rooms.phases import Side
from baton.rooms.worker_facts import StackFacts, WorkerFacts
from baton.rooms.worker_load import WorkerLoad
from bench.report import seconds_of

LEASE_MS: Final = 3_000
TOKENS_MAX: Final = 1_000_000
PROMPT: Final = 16 * BLOCK_TOKENS
SHARED: Final = 2 * BLOCK_TOKENS
"""Length of the prefix of all prompts."""
TURNS: Final = 4
"""Requests of a conversation, each longer than the one before."""
NEED_TOKENS: Final = PROMPT + 256
ROOM_TOKENS: Final = 16
"""Tokens of a room, so few that any number of rooms may be open."""


class Stack:
    """Registry with a number of ready workers of each side."""

    def __init__(self, workers: int, rooms_max: int) -> None:
        self.registry = Registry("model", 1, LEASE_MS, 1024, 1024)
        self._numbers = iter(range(1_000_000_000))
        self._workers = workers
        facts = [
            WorkerFacts(
                f"{side.value}-{number}",
                side,
                Incarnation(2 * number + (side is Side.DECODE) + 1),
                "127.0.0.1:1",
                "model",
                StackFacts(),
                TOKENS_MAX,
                rooms_max,
            )
            for number in range(workers)
            for side in Side
        ]
        self.register_s = seconds_of(lambda: self._join(facts))

    def _join(self, workers: Sequence[WorkerFacts]) -> None:
        for facts in workers:
            self.registry.register(facts, 0)
            self.registry.mark_proven(facts.incarnation)
            if facts.side is Side.DECODE:
                self._report_load(facts.incarnation, 0)

    def _report_load(self, decode: Incarnation, rooms: int, entered: int = 0) -> None:
        """Report a decode worker's load with its open rooms, up to the last that it entered."""
        free, number = TOKENS_MAX - ROOM_TOKENS * rooms, next(self._numbers)
        self.registry.update_load(decode, WorkerLoad((free,), (0,), 0, 0, 0, RoomId(entered), number), 0)

    def place(self) -> float:
        """Return the seconds of one placement. Its room stays open, and its decode worker reports it."""
        need = Need(PROMPT, NEED_TOKENS, _prompt(next(self._numbers)))

        def work() -> None:
            entries.append(self.registry.open_room("request", self.registry.place(need), need, 0))

        entries: list[RoomEntry] = []
        taken_s = seconds_of(work)
        (entry,) = entries
        self.registry.mark_delivered(entry.id, Side)
        worker = self.registry.worker(entry.decode.incarnation)
        self._report_load(worker.facts.incarnation, len(worker.rooms), entry.id)
        return taken_s

    def load(self) -> float:
        """Return the seconds of handling one load report."""
        number = next(self._numbers)
        decode = Incarnation(2 * (number % self._workers) + 2)
        return seconds_of(lambda: self._report_load(decode, number % 1_000))

    def look(self) -> float:
        """Return the seconds of one periodic check."""
        registry = self.registry

        def work() -> None:
            registry.renew(Incarnation(1), 0)
            registry.expired(0)
            registry.orphans(0)
            registry.overdue(0)
            registry.unreachable()
            sum(registry.phases.values())
            registry.has_open_rooms(Incarnation(0))

        return seconds_of(work)


def measure(runs: int, workers: int, few: int, rooms: int) -> dict[str, Any]:
    """Measure all in turns, so that a disturbance of the machine affects all of them."""
    small, large = Stack(few, runs), Stack(workers, rooms)
    places = [(small.place(), large.place()) for _ in range(runs)]
    idle, full = Stack(few, rooms), Stack(few, rooms)
    for _ in range(rooms):
        full.place()
    opened = [(idle.place(), full.place()) for _ in range(runs)]
    looks = [(idle.look(), full.look()) for _ in range(runs)]
    loads = [(small.load(), large.load()) for _ in range(runs)]
    return {
        "runs": runs,
        "workers": [few, workers],
        "rooms": [runs, rooms],
        "register_s": [round(small.register_s, 4), round(large.register_s, 4)],
        "place": _beside(places),
        "place_with_rooms": _beside(opened),
        "look_with_rooms": _beside(looks),
        "load": _beside(loads),
        "ratio": _beside(places)["ratio"],
        "ratio_of": ["many", "few"],
    }


def _beside(seconds: list[tuple[float, float]]) -> dict[str, Any]:
    few, many = (statistics.median(each[at] for each in seconds) for at in range(2))
    told = {"few": round(few * 1_000, 4), "many": round(many * 1_000, 4)}
    return {"median_ms": told, "ratio": round(many / few, 2)}


def _prompt(number: int) -> tuple[Block, ...]:
    """Return a prompt: a prefix of all prompts, one of the conversation, and new tokens."""
    talk, turn = divmod(number, TURNS)
    own = range(1_000_000 + PROMPT * talk, 1_000_000 + PROMPT * (talk + 1))
    old = BLOCK_TOKENS * (turn + 1)
    new = range(-PROMPT * (number + 1), -PROMPT * number)
    return hash_blocks((*range(SHARED), *own[:old], *new[: PROMPT - SHARED - old]))
