"""The trace of a simulation run: its events in order for people, and one digest to compare replays."""

import hashlib
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

EVENTS_KEPT: Final = 50_000
LINES_MAX: Final = 80
SAME_MAX: Final = 4
"""Most violations of one invariant that are recorded, since those that follow from the first ones say
little."""


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: str
    """A name from docs/verification.md."""
    text: str
    room: int = 0
    timeline: tuple[str, ...] = ()


@dataclass(slots=True)
class Trace:
    """Bounded. `note` is called for whatever can differ between two runs."""

    clock_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    _events: deque[tuple[float, str, str, int, str]] = field(
        default_factory=lambda: deque(maxlen=EVENTS_KEPT)
    )
    _hash: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    _pending: list[str] = field(default_factory=list)

    def note(self, now_s: float, who: str, what: str, room: int = 0, detail: str = "") -> None:
        """`detail`: no addresses of memory, which differ between two runs."""
        event = (now_s, who, what, room, detail)
        self._events.append(event)
        self._pending.append(f"{now_s:.6f}|{who}|{what}|{room}|{detail}")
        if len(self._pending) >= 256:
            self._absorb()

    def fault(self, now_s: float, kind: str, detail: str = "") -> None:
        self.faults[kind] += 1
        self.note(now_s, "fault", kind, 0, detail)

    def violate(self, now_s: float, invariant: str, text: str, room: int = 0) -> None:
        self.note(now_s, "check", invariant, room, text)
        if sum(each.invariant == invariant for each in self.violations) < SAME_MAX:
            self.violations.append(Violation(invariant, text, room, tuple(self.lines(room))))

    def lines(self, room: int = 0) -> list[str]:
        """Return the last events, or those of one room with the faults between them, as text."""
        chosen = [event for event in self._events if not room or event[3] == room or event[1] == "fault"]
        return [
            f"{now_s:10.4f}  {who:<14} {what}" + (f" room {about}" if about else "") + f"  {detail}"
            for now_s, who, what, about, detail in chosen[-LINES_MAX:]
        ]

    def digest(self) -> str:
        self._absorb()
        return self._hash.hexdigest()

    def _absorb(self) -> None:
        self._hash.update("\n".join(self._pending).encode())
        self._pending.clear()
