"""Checks that can catch a mutant, and the invariant that each reports as broken.

The product is imported when a check runs and not before, since the mutant has to be in place by then."""

import asyncio
import difflib
import inspect
import io
import os
import re
from collections.abc import Awaitable, Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

from tests.mutants.mutant import ROOT, Check

STORIES: Final = ROOT / "tests" / "stories"
NAMED: Final = re.compile(r"`([a-z]+(?:-[a-z]+)+)`")
PATIENCE_S: Final = 5.0
"""Time that a test waits for an event which the mutant may prevent, seconds. The test has then failed."""
QUIET: Final = ("-p", "no:cacheprovider", "-p", "no:warnings", "--no-header", f"--timeout={4 * PATIENCE_S:g}")
"""Options of pytest. The timeout is above the tests' own patience, since a process may crash if it strikes
within grpc."""
TAIL_CHARS: Final = 4000
ROOMS: Final = 100
"""Number of rooms in one run of the simulation."""


@dataclass(frozen=True, slots=True)
class Finding:
    invariant: str
    by: str
    """The kind of check."""
    check: str
    trace: str


def find(check: Check, wanted: str) -> Finding | None:
    """Run one check. None when it finds nothing. `wanted`: what a test of the suite stands for."""
    match check.kind:
        case "story":
            return _story(check.what)
        case "model":
            return _model(check.what)
        case "sim":
            return _sim(check.what, wanted)
        case "suite":
            return _suite(check.what, wanted)
        case _:
            raise ValueError(f"no kind of check: {check}")


def invariant_of(story: str) -> str:
    """Return the invariant that a story is about: the first one that its opening words name."""
    named = NAMED.search(story.split("\n\n", 1)[0])
    if named is None:
        raise ValueError(f"a story that names no invariant: {story[:80]!r}")
    return named[1]


def _story(name: str) -> Finding | None:
    from tests.stories import language, whole_story

    told = (STORIES / f"{name}.txt").read_text(encoding="utf-8")
    played = (whole_story if name.startswith("whole/") else language).play(told)
    if played == told:
        return None
    lines = difflib.unified_diff(
        told.splitlines(), played.splitlines(), "as it is told", "as it is played", n=8, lineterm=""
    )
    return Finding(invariant_of(told), "story", name, "\n".join(lines))


def _model(scope: str) -> Finding | None:
    from tests.model.scopes import SCOPES
    from tests.model.search import Search

    for violation in Search(SCOPES[scope]).run().violations:
        return Finding(violation.law.value, "model", scope, f"{violation.text}\n\n{violation.story}")
    return None


def _sim(what: str, wanted: str) -> Finding | None:
    """The wanted violation, from the first seed that has it, or else the first of all: one fault shows in
    several ways, and which is seen first changes with every change of the product."""
    from tests.sim.run import run

    profile, seeds = seeds_of(what)
    found: Finding | None = None
    for seed in seeds:
        for each in run(seed, ROOMS, profile).violations:
            trace = "\n".join((f"seed {seed}: {each.text}", *each.timeline))
            found = found or Finding(each.invariant, "sim", f"{profile}/{seed}", trace)
            if each.invariant == wanted:
                return Finding(wanted, "sim", f"{profile}/{seed}", trace)
    return found


def seeds_of(what: str) -> tuple[str, range]:
    """The profile of a check of the simulation, and its seeds."""
    profile, seeds = what.split("/")
    return profile, range(*map(int, seeds.split(":")))


class _Impatient:
    """A pytest plugin by which a test that awaits without an end what a mutant prevents has failed, too."""

    def pytest_itemcollected(self, item: Any) -> None:
        test = getattr(item, "obj", None)
        if inspect.iscoroutinefunction(test):
            item.obj = _within_patience(test)


def _within_patience(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @wraps(test)
    async def bounded(*given: Any, **named: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test(*given, **named)

    return bounded


def _suite(tests: str, wanted: str) -> Finding | None:
    import pytest

    os.environ["TESTS_PATIENCE_S"] = str(PATIENCE_S)  # read by tests.patience, which is not imported yet
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        chosen = [f"tests/{test}" for test in tests.split()]
        status = pytest.main(["-q", "-x", *QUIET, *chosen], plugins=[_Impatient()])
    text = said.getvalue()[-TAIL_CHARS:]
    if status == pytest.ExitCode.OK:
        return None
    if status != pytest.ExitCode.TESTS_FAILED:
        raise RuntimeError(f"{tests} did not run: {status!r}\n{text}")
    return Finding(wanted, "suite", tests, text)
