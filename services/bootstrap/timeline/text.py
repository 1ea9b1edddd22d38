"""Sentences about a request for its timeline: the headline, and the explanation of its failure."""

from collections.abc import Sequence
from typing import Final

from baton.bootstrap.timeline.pauses import Pause
from baton.bootstrap.timeline.retry_chains import was_interrupted, was_refused
from baton.bootstrap.timeline.timeline_schema import CauseInfo, State
from baton.fleet.room_entry import RoomEntry
from baton.rooms.errors import Cause
from baton.rooms.reasons import REASONS

ENDS_SENTENCE: Final = (".", "!", "?")


def why(cause: Cause | None) -> CauseInfo | None:
    return None if cause is None else CauseInfo(cause.reason.value, cause.text, REASONS[cause.reason].meaning)


def format_ms(ms: float) -> str:
    """Return a duration, given in milliseconds, as text in a readable unit."""
    if ms < 10:
        return f"{ms:.1f} ms"
    return f"{ms:,.0f} ms" if ms < 10_000 else f"{ms / 1000:,.1f} s"


def headline(
    state: State,
    rooms: Sequence[RoomEntry],
    total_ms: float,
    first_ms: float | None,
    tokens: str,
    said: str,
    pauses: Sequence[Pause],
    local: str,
) -> str:
    """Return the headline of a request: a summary in one or more sentences.

    `tokens`: what the router passed on, as text. `said`: why there is no other room, if the router wrote
    that. `pauses`: pauses while its worker needed its pages. `local`: why decode computed its prompt, if it
    did.
    """
    last = rooms[-1]
    cause = last.cause.text if last.cause is not None else ""
    waits = "to go on"
    if was_refused(last):
        waits = f"for a place again, since {cause}"
    if was_interrupted(last):
        cause = said
    first = "" if first_ms is None else f"; the first token came after {format_ms(first_ms)}"
    match state:
        case State.ANSWERED:
            text = f"Answered in {format_ms(total_ms)}{first}"
            text += f"; {tokens}" if tokens else ""
        case State.FAILED:
            text = f"Failed after {format_ms(total_ms)}: {cause}"
            text += f"; not retried: {said}" if said and said not in cause else ""
            text += f"; {tokens}" if tokens else ""
        case State.GONE:
            text = f"The client hung up after {format_ms(total_ms)}{first or ', before the first token'}"
            text += f"; {tokens}" if tokens and first else ""
        case State.STREAMING:
            text = f"Streams since {format_ms(total_ms - (first_ms or 0.0))}{first}"
        case State.RETRYING:
            text = f"Its room failed, and it may go on in another: {cause}"
        case State.PAUSED:
            text = f"Waits {waits}, {format_ms(total_ms)} after it came{first}"
        case _:
            text = f"Waits for its first token since {format_ms(total_ms)}"
    here = f" Decode computed its prompt: {_sentence(local)}" if local else ""
    return _sentence(text) + here + _paused(pauses) + _rooms(rooms)


def _paused(pauses: Sequence[Pause]) -> str:
    if not pauses:
        return ""
    took = format_ms(sum(pause.ms for pause in pauses))
    if len(pauses) == 1:
        return f" Paused {took}: the worker needed its pages."
    return f" Paused {took} in {len(pauses)} pauses: its workers needed its pages."


def _rooms(rooms: Sequence[RoomEntry]) -> str:
    """Return sentences about the rooms that were refused or failed before the last one. Empty if there are
    none."""
    refused = [entry.cause.text for entry in rooms[:-1] if entry.cause is not None and was_refused(entry)]
    failed = [
        entry.cause.text for entry in rooms[:-1] if entry.cause is not None and not was_interrupted(entry)
    ]
    text = ""
    if refused:
        times = "" if len(refused) == 1 else f" {len(refused)} times"
        text = f" It waited for a place again{times}: {_sentence(refused[0])}"
    if failed:
        count = "A room" if len(failed) == 1 else f"{len(failed)} rooms"
        text += f" {count} failed before this one, which went on for it: {_sentence(failed[0])}"
    return text


def _sentence(text: str) -> str:
    return text if text.endswith(ENDS_SENTENCE) else f"{text}."
