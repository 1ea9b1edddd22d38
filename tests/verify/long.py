"""Verification for hours: the model's large scopes, and endless seeds of the simulation."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, Final

from tests.model.scopes import SCOPES
from tests.verify.lanes import Piece, in_lanes
from tests.verify.parts import SEEDS_AT_A_TIME, asked, simulated

HOURS_MAX: Final = 24.0
"""Most hours for one scope of the model."""
SEEDS_MAX: Final = 10**9


def go_on(seed: int | None, hours: float | None, jobs: int) -> int:
    """Run checks until `hours` are over, or for ever if it is None. The simulation starts at `seed`, or at a
    drawn one."""
    first = time.time_ns() % SEEDS_MAX if seed is None else seed
    _tell({"first_seed": first})
    batches = _Batches(time.monotonic() + 3600 * hours if hours is not None else float("inf"))
    problems = in_lanes(chain(batches.model(), batches.simulation(first)), (), jobs)
    _tell({"problems": problems, "broken": batches.broken})
    return 1 if problems or batches.broken else 0


class _Batches:
    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._lock = threading.Lock()
        self.broken = 0

    def model(self) -> Iterator[Piece]:
        for scope in (each for each in SCOPES.values() if not each.quick):
            if time.monotonic() >= self._until_s:
                return
            yield Piece(f"model, {scope.name}", partial(self._model, scope.name))

    def simulation(self, first: int) -> Iterator[Piece]:
        while time.monotonic() < self._until_s:
            seeds = range(first, first + SEEDS_AT_A_TIME)
            yield Piece(f"simulation, seeds {seeds.start}:{seeds.stop}", partial(self._simulate, seeds))
            first = seeds.stop

    def _model(self, scope: str) -> str:
        came = asked("tests.model", "--scope", scope, "--json", limit_s=3600 * HOURS_MAX)
        return self._told({"model": came}, came["violations"])

    def _simulate(self, seeds: range) -> str:
        came = simulated(seeds)
        return self._told({"simulation": came}, came["violations"])

    def _told(self, batch: dict[str, Any], violations: int) -> str:
        with self._lock:
            self.broken += violations
            _tell(batch)
        return f"{violations} violations"


def _tell(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
