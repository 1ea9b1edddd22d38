"""Answers of a stack whose workers of both sides are killed in turn, beside undisturbed ones."""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Final, Protocol

from baton.models.model_files import DEMO, prepare, resolve
from baton.runtime.model_options import LoadFormat
from tests.http import web
from tests.process.stack import Stack

AT_ONCE: Final = 8
ANSWER_S: Final = 120.0
BETWEEN_KILLS_S: Final = 1.0
NEAR: Final = 1e-4
LOST: Final = {"prefill": "prefill_lost", "decode": "decode_lost"}


@dataclass(frozen=True)
class Answered:
    status: int
    ids: tuple[int, ...]
    text: str
    finish: str
    logprobs: tuple[float, ...] = field(default=(), compare=False)
    """Log-probabilities of the tokens. Empty if not requested."""

    def is_that(self, other: "Answered") -> bool:
        """Return whether both answers have the same tokens and nearly equal logprobs. The last bits differ,
        since libraries sum in an order that depends on the rest of a step."""
        near = (abs(one - its) < NEAR for one, its in zip(self.logprobs, other.logprobs, strict=False))
        return self == other and len(self.logprobs) == len(other.logprobs) and all(near)


@dataclass
class Disturbance:
    again: int = 0
    """Answers while workers were killed, each compared with what it was undisturbed."""
    differ: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    went_on: Counter[str] = field(default_factory=Counter)
    """Answers that another worker took over, by side of the killed worker."""


class Sound(Protocol):
    """Result of a run."""

    @property
    def sound(self) -> bool: ...


Ask = Callable[[int, str], Answered]
"""Function that sends the request of this number under an id, and returns its answer."""


class Disturbed:
    """Asks for all answers once more, and goes on until workers of both sides were lost in midst of some."""

    def __init__(self, stack: Stack, ask: Ask, answers: Sequence[Answered], found: Disturbance) -> None:
        self._stack = stack
        self._ask = ask
        self._answers = answers
        self._found = found
        self._lock = threading.Lock()
        self._next = 0
        self._over = threading.Event()

    def run(self, kills: int, limit_s: float) -> None:
        """Kill workers of both sides in turn, until `kills` on each side have cost an answer its worker.
        Raises AssertionError if that takes too long."""
        ends = time.monotonic() + limit_s
        threads = [threading.Thread(target=self._go_on) for _ in range(AT_ONCE)]
        for each in threads:
            each.start()
        try:
            for side, index in cycle([("prefill", 0), ("decode", 0), ("prefill", 1), ("decode", 1)]):
                if self._enough(kills):
                    break
                assert time.monotonic() < ends, (
                    f"only {self._found.went_on} were missed, of {self._found.kills}"
                )
                time.sleep(BETWEEN_KILLS_S)
                name = f"{side}-{index}"
                self._stack.services[name].kill()
                self._found.kills[side] += 1
                self._stack.restart(name)
                self._stack.wait_ready(4)
        finally:
            self._over.set()
            for each in threads:
                each.join(ANSWER_S)

    def _enough(self, kills: int) -> bool:
        with self._lock:
            missed = all(self._found.went_on[side] >= kills for side in LOST)
            return missed and self._found.again >= len(self._answers)

    def _go_on(self) -> None:
        while not self._over.is_set():
            with self._lock:
                turn, self._next = self._next, self._next + 1
            number, request_id = turn % len(self._answers), f"killed-{turn}"
            try:
                answer, lost = self._ask(number, request_id), self._lost(request_id)
            except Exception as error:
                answer, lost = Answered(0, (), repr(error), ""), set()
            with self._lock:
                self._found.again += 1
                self._found.went_on.update(lost)
                if not answer.is_that(self._answers[number]):
                    self._found.differ.append(f"{number}, lost {lost}: {answer} for {self._answers[number]}")

    def _lost(self, request_id: str) -> set[str]:
        """Return the sides of which this answer lost a worker."""
        listed = web().get(f"{self._stack.url}/rooms", params={"request_id": request_id}).json()["rooms"]
        causes = {room["cause"]["reason"] for room in listed if room.get("cause")}
        return {side for side, reason in LOST.items() if reason in causes}


def command(
    module: str,
    about: str | None,
    of: str,
    count: int,
    stack_on: Callable[[Path, Path], AbstractContextManager[Stack]],
    run: Callable[[Stack, int, int, float], Sound],
) -> int:
    """Run `python -m tests.process.MODULE --OF COUNT`: print one JSON object and return the exit status.
    `stack_on`: makes a stack, given a folder for a tiny model and the demo model's. `run`: sends that many
    requests with that many kills of each side, for at most that many seconds."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.process.{module}", description=about)
    parser.add_argument(f"--{of}", dest="count", type=int, default=count)
    parser.add_argument("--kills", type=int, default=5, help="that an answer goes on after, of each side")
    parser.add_argument("--limit", type=float, default=3_600.0, help="seconds, of the answers with kills")
    args = parser.parse_args()
    demo = prepare(resolve(DEMO, LoadFormat.AUTO), lambda _: None)
    with (
        tempfile.TemporaryDirectory(prefix=f"baton-{module}-") as folder,
        stack_on(Path(folder) / "tiny", demo) as stack,
    ):
        found = run(stack, args.count, args.kills, args.limit)
    sys.stdout.write(json.dumps(vars(found) | {"ok": found.sound}) + "\n")
    return 0 if found.sound else 1
