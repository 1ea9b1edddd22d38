"""Laws that must hold in every state, by name, and the error that reports a broken one.

Names are those of the invariants that the code, the tests and docs/verification.md use. A law is checked
against what truly is (memory, writes under way), never against what the product believes.
"""

from enum import Enum
from typing import Final

from baton.pages.errors import OutOfPages, PagesError
from baton.rooms.errors import LocalBug, RostersDiverged


class Law(Enum):
    SLOT_ZERO = "slot-zero"
    SLOT_OWNER = "slot-owner"
    SEAL_LAST = "seal-last"
    ONE_WRITER = "one-writer"
    LAYERS_BY_ID = "layers-by-id"
    GATE_BEFORE_AGREE = "gate-before-agree"
    NO_FREE_UNDER_WRITE = "no-free-under-write"
    EXPOSURE_ON_PAGE = "exposure-on-page"
    SOURCE_PINNED = "source-pinned"
    WRITTEN_BEFORE_SENT = "written-before-sent"
    PROOF_NOT_TIME = "proof-not-time"
    ACK_IS_PROOF = "ack-is-proof"
    STALE_NEVER_SERVED = "stale-never-served"
    CHOICES_APART = "choices-apart"
    CHOICES_END_ALONE = "choices-end-alone"
    ONE_RETIRE = "one-retire"
    EXITS_RELEASE_ALL = "exits-release-all"
    ROOM_UNIQUE = "room-unique"
    ROOM_ISSUED = "room-issued"
    TERMINAL_ABSORBS = "terminal-absorbs"
    TERMINAL_CREATES_NOTHING = "terminal-creates-nothing"
    FIRST_CAUSE_WINS = "first-cause-wins"
    SAME_TURNS = "same-turns"
    APPLY_VERDICT = "apply-verdict"
    FAILURE_IS_AGREED = "failure-is-agreed"
    ADMISSION_AGREED = "admission-agreed"
    COMMANDS_ORDERED = "commands-ordered"
    CANCEL_REMEMBERED = "cancel-remembered"
    OLDEST_GOES_ON = "oldest-goes-on"
    RETRACTED_IS_NO_FAILURE = "retracted-is-no-failure"
    GROWTH_IS_AGREED = "growth-is-agreed"
    MEMORY_AS_USED = "memory-as-used"
    DRAFTS_MAKE_WAY = "drafts-make-way"
    NOT_TAKEN_NEVER_READ = "not-taken-never-read"
    WAITING_HAS_NO_DEADLINE = "waiting-has-no-deadline"
    DIVERGENCE_DETECTED = "divergence-detected"
    MOVES_LISTED = "moves-listed"
    MINE_OR_GRANTED = "mine-or-granted"
    ROOM_ENDS = "room-ends"
    RECONNECT = "reconnect"
    ZERO_AT_IDLE = "zero-at-idle"
    DRAIN_KEEPS_PROMISES = "drain-keeps-promises"
    OPENER_OWNS = "opener-owns"
    ADOPT_FIRST_WINS = "adopt-first-wins"
    ORPHAN_ENDS = "orphan-ends"
    EXIT_BY_STARTER = "exit-by-starter"


class Broken(Exception):
    """Raised when a law does not hold."""

    def __init__(self, law: Law, text: str) -> None:
        super().__init__(f"{law.value}: {text}")
        self.law = law
        self.text = text


CRASHES: Final = (LocalBug, PagesError, KeyError, IndexError, AssertionError, ValueError)
"""Errors that a worker's turn may not raise, because they would end the process."""


def broken_by(error: Exception) -> Broken:
    """Return the law that a crash of the product with this error stands for."""
    text = f"{type(error).__name__}: {error}"
    match error:
        case RostersDiverged():
            return Broken(Law.DIVERGENCE_DETECTED, text)
        case OutOfPages():
            return Broken(Law.ADMISSION_AGREED, text)
        case _:
            return Broken(Law.MOVES_LISTED, text)
