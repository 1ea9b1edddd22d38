"""Pieces of verification, and the result of each."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from tests.apart import answer_of
from tests.model.scopes import SCOPES
from tests.mutants.__main__ import summary
from tests.mutants.checks import ROOMS, seeds_of
from tests.mutants.lanes import Errand, Outcome, controls, errands
from tests.mutants.mutant import ROOT
from tests.mutants.tables import MUTANTS
from tests.verify.lanes import Piece

SEEDS_AT_A_TIME: Final = 5
SEEDS_S: Final = 600.0
REQUESTS: Final = {
    **dict.fromkeys(("calm", "network", "crashes", "pauses", "hangups", "drain", "fence"), 450),
    **dict.fromkeys(("prefixes", "renewals", "local", "both", "states"), 450),
    **dict.fromkeys(("writes", "full", "engine", "ranks", "late"), 150),
    **dict.fromkeys(("everything", "packed", "aborts", "stalls"), 100),
    "choices": 60,
    "growth": 50,
    "drafts": 50,
    "seals": 40,
    "thirds": 40,
}
"""Requests of a run, for profiles with another number: fewer where one costs more, as in "seals", and more
where it costs little."""
SCOPES_AT_A_TIME: Final = 8
"""Quick scopes that run at the same time."""


class Broken(Exception):
    """Raised when a part could not be run at all."""


def asked(module: str, *words: str, limit_s: float) -> dict[str, Any]:
    """Run a part, and return the one JSON object that it prints. Its exit status is ignored, since the object
    has the findings."""
    command = [sys.executable, "-m", module, *words]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise Broken(f"{' '.join(command[1:])} took more than {limit_s:g} s") from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        said = (done.stdout + done.stderr)[-2000:]
        raise Broken(f"{' '.join(command[1:])} ended with status {done.returncode}:\n{said}") from error
    return answer


def simulated(seeds: range, profile: str | None = None, rooms: int | None = None) -> dict[str, Any]:
    """Return the result of simulation seeds, by profile or with their own profiles. Requests default to
    `REQUESTS`, or to a run's own number. Raises NoAnswer."""
    came: dict[str, Any] = answer_of(_simulate, seeds, profile, rooms, limit_s=SEEDS_S)
    return came


def _simulate(seeds: range, profile: str | None, rooms: int | None) -> dict[str, Any]:
    from tests.sim.__main__ import summary
    from tests.sim.profile import NAMES
    from tests.sim.run import ROOMS, run

    def requests(seed: int) -> int:
        return REQUESTS.get(profile or NAMES[seed % len(NAMES)], ROOMS) if rooms is None else rooms

    ran = (run(seed, requests(seed), profile, tidy=False) for seed in seeds)
    return summary(ran, (seeds.start, seeds.stop), time.monotonic())


def seeds_of_mutants() -> dict[str, range]:
    """Return the mutants' seeds by profile, which must find nothing in the unchanged source."""
    known: dict[str, range] = {}
    for check in (check for mutant in MUTANTS for check in mutant.checks if check.kind == "sim"):
        profile, seeds = seeds_of(check.what)
        before = known.get(profile, seeds)
        known[profile] = range(min(before.start, seeds.start), max(before.stop, seeds.stop))
    return known


@dataclass
class Simulation:
    """The seeds by which mutants are seen, and seeds from `first_seed` on until enough rooms have been
    simulated."""

    rooms_wanted: int
    first_seed: int
    until_s: float
    """Time of `time.monotonic` after which no further seeds are begun, since too few are better than too
    late."""
    rooms: int = 0
    runs: int = 0
    violations: int = 0
    end_seed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    broken: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pieces(self) -> Iterator[Piece]:
        for profile, seeds in seeds_of_mutants().items():
            yield self._piece(f"{profile}, ", seeds, profile, ROOMS)
        self.end_seed = self.first_seed
        while self.rooms < self.rooms_wanted and time.monotonic() < self.until_s:
            first, self.end_seed = self.end_seed, self.end_seed + SEEDS_AT_A_TIME
            yield self._piece("", range(first, self.end_seed))

    def _piece(self, what: str, seeds: range, profile: str | None = None, rooms: int | None = None) -> Piece:
        named = f"simulation, {what}seeds {seeds.start}:{seeds.stop}"
        return Piece(named, partial(self._run, seeds, profile, rooms))

    def _run(self, seeds: range, profile: str | None, rooms: int | None) -> str:
        came = simulated(seeds, profile, rooms)
        with self._lock:
            self.rooms += came["rooms"]
            self.runs += came["runs"]
            self.violations += came["violations"]
            self.faults += Counter(came["faults"])
            self.outcomes += Counter(came["outcomes"])
            self.broken += came["broken"]
        return f"{came['rooms']} rooms, {came['violations']} violations"

    def summary(self) -> dict[str, Any]:
        return {
            "rooms": self.rooms,
            "violations": self.violations,
            "runs": self.runs,
            "seeds": [self.first_seed, self.end_seed],
            "faults": dict(sorted(self.faults.items())),
            "outcomes": dict(sorted(self.outcomes.items())),
            "broken": self.broken,
        }

    @property
    def sound(self) -> bool:
        return self.violations == 0 and self.rooms >= self.rooms_wanted


def _searched(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    from tests.model.__main__ import summary
    from tests.model.scopes import SCOPES
    from tests.model.search import Search

    return {name: summary(Search(SCOPES[name]).run()) for name in names}


@dataclass
class ModelPart:
    """Every scope but those that take too long for this: the large ones by themselves, the others some at a
    time."""

    limit_s: float = 900.0
    found: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pieces(self) -> Iterator[Piece]:
        large = [[scope.name] for scope in SCOPES.values() if not (scope.quick or scope.long)]
        quick = [scope.name for scope in SCOPES.values() if scope.quick]
        some = [quick[at : at + SCOPES_AT_A_TIME] for at in range(0, len(quick), SCOPES_AT_A_TIME)]
        for names in (*large, *some):
            yield Piece(f"model, {' '.join(names)}", partial(self._run, names))

    def _run(self, names: Sequence[str]) -> str:
        came: dict[str, dict[str, Any]] = answer_of(_searched, names, limit_s=self.limit_s)
        with self._lock:
            self.found |= came
        states = sum(scope["states"] for scope in came.values())
        return f"{states} states, {sum(scope['violations'] for scope in came.values())} violations"

    @property
    def _violations(self) -> int:
        return sum(scope["violations"] for scope in self.found.values())

    @property
    def sound(self) -> bool:
        whole = all(scope["complete"] for scope in self.found.values())
        return bool(self.found) and whole and self._violations == 0


@dataclass
class Mutants:
    """Every mutant, and the stories on the source as it is. The scopes and the seeds that see mutants are
    `ModelPart`'s and `Simulation`'s; the tests that do are `make test-all`'s."""

    outcomes: list[Outcome] = field(default_factory=list)

    def pieces(self) -> Iterator[Piece]:
        true = [each for each in controls(MUTANTS) if each.checks[0].kind == "story"]
        for errand in [*errands(MUTANTS), *true]:
            yield Piece(f"mutant {errand.name}", partial(self._run, errand))

    def _run(self, errand: Errand) -> str:
        outcome = errand.run()
        self.outcomes.append(outcome)
        return outcome.problem or (outcome.found.invariant if outcome.found is not None else "nothing found")

    def summary(self) -> dict[str, Any]:
        return summary(self.outcomes, MUTANTS)

    @property
    def sound(self) -> bool:
        told = self.summary()
        return bool(told["caught"] == told["total"] and not told["control"])
