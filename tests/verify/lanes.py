"""Pieces of work done a fixed number at a time."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    name: str
    do: Callable[[], str]
    """Function that does the piece, and returns its result as text for people."""


def in_lanes(busy: Iterable[Piece], waiting: Iterable[Piece], count: int) -> list[str]:
    """Run all pieces, `count` at a time, each as soon as a lane is free. The first lane begins with pieces
    that mostly wait, the others with those that compute. Returns the pieces that failed."""
    problems: list[str] = []
    lock, computing, idling = threading.Lock(), iter(busy), iter(waiting)
    orders = [(idling, computing), *[(computing, idling)] * (count - 1)]
    lanes = [threading.Thread(target=_lane, args=(order, lock, problems)) for order in orders]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    return problems


def _lane(order: Sequence[Iterator[Piece]], lock: threading.Lock, problems: list[str]) -> None:
    while True:
        with lock:
            piece = next((piece for pieces in order for piece in pieces), None)
        if piece is None:
            return
        started = time.monotonic()
        try:
            came = piece.do()
        except Exception as error:
            came = f"{piece.name}: {error}"
            problems.append(came)
        sys.stderr.write(f"verify: {piece.name}: {came} ({time.monotonic() - started:.0f} s)\n")
