"""Checks that the gauges of a stack's processes are back at their idle values (`zero-at-idle`)."""

import time
from collections.abc import Callable, Mapping
from typing import Final

import httpx

Sample = tuple[str, tuple[tuple[str, str], ...]]
"""A series: its name and its labels."""
Gauges = Mapping[str, Mapping[Sample, float]]
"""Values of gauges, by process and series."""

IDLE_S: Final = 30.0
POLL_S: Final = 0.05
OF_A_PROCESS: Final = ("process_", "python_")
"""Prefixes of gauges of a process as a whole, which no request changes back."""


def at_rest(read: Callable[[], Gauges]) -> Gauges | None:
    """Return the gauges once no process holds a room, canary rooms included, and no worker joins. Return
    None if that does not happen in time."""
    give_up = time.monotonic() + IDLE_S
    while time.monotonic() < give_up:
        now = read()
        samples = [item for gauges in now.values() for item in gauges.items()]
        if not any(value and _passes(sample) for sample, value in samples):
            return now
        time.sleep(POLL_S)
    return None


def _passes(sample: Sample) -> bool:
    """Return whether a series counts what passes by itself: rooms, and workers that join."""
    name, labels = sample
    return name == "baton_rooms" or (name == "baton_workers" and ("state", "joining") in labels)


def not_back(read: Callable[[], Gauges], start: Gauges) -> list[str]:
    """Wait until every gauge is back at its value in `start`. Returns the differences that are left, or an
    empty list."""
    give_up = time.monotonic() + IDLE_S
    different: list[str] = []
    while time.monotonic() < give_up:
        try:
            different = [*_different(read(), start)]
        except httpx.TransportError as error:  # a worker that was killed is started again
            different = [str(error)]
        if not different:
            break
        time.sleep(POLL_S)
    return different


def _different(now: Gauges, start: Gauges) -> list[str]:
    return [
        f"{name} {sample}: {now[name].get(sample)} (was {value})"
        for name, samples in start.items()
        for sample, value in samples.items()
        if now[name].get(sample) != value and not sample[0].startswith(OF_A_PROCESS)
    ]
