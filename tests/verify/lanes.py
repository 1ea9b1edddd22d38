"""How are many pieces of work done, so many at a time?"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple


class Piece(NamedTuple):
    name: str
    do: Callable[[], str]
    """Returns what came of it, for people."""


def in_lanes(pieces: Iterable[Piece], count: int) -> list[str]:
    """Do them, `count` at a time, each asked for when a lane is free. Returns what could not be done."""
    problems: list[str] = []
    lock, waiting = threading.Lock(), iter(pieces)
    lanes = [threading.Thread(target=_lane, args=(waiting, lock, problems)) for _ in range(count)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    return problems


def _lane(waiting: Iterator[Piece], lock: threading.Lock, problems: list[str]) -> None:
    while True:
        with lock:
            piece = next(waiting, None)
        if piece is None:
            return
        started = time.monotonic()
        try:
            came = piece.do()
        except Exception as error:
            came = f"{piece.name}: {error}"
            problems.append(came)
        sys.stderr.write(f"verify: {piece.name}: {came} ({time.monotonic() - started:.0f} s)\n")
