"""What happened to a request, in a sentence, and what does the cause of a failure mean to its finder?"""

from collections.abc import Mapping, Sequence
from typing import Final

from services.bootstrap.story.parts import State, Why
from services.rooms.entries import RoomEntry
from services.rooms.errors import Cause, Reason

MEANING: Final[Mapping[Reason, str]] = {
    Reason.ANSWERED: "The client had all that it asked for, and the workers were told to stop.",
    Reason.CLIENT_GONE: "Nothing is wrong here: the client closed its connection, and both workers stopped.",
    Reason.CANCELLED: "Whoever opened the room ended it.",
    Reason.DEADLINE: "A phase made no progress for as long as it may: the longest bar before the failure is"
    " where it stood still, and the text says what it waited for.",
    Reason.PREFILL_LOST: "The prefill process died, left, or was silent for longer than its lease. Look for"
    " its exit in the platform, and at the end of its log.",
    Reason.DECODE_LOST: "The decode process died, left, or was silent for longer than its lease. Look for"
    " its exit in the platform, and at the end of its log.",
    Reason.BOOTSTRAP_LOST: "The bootstrap could not follow the room to its end.",
    Reason.CONNECT_FAILED: "Decode and prefill did not reach each other (addresses, network policy, layouts"
    " that do not map), or prefill did not take decode's destination; the text names which.",
    Reason.TRANSFER_FAILED: "A write of pages between the two workers failed, or a seal came too early.",
    Reason.RECORD_CORRUPT: "What landed in the metadata slot is not what this room's sender should have"
    " written. It was not served; the memory is kept until no write can land in it.",
    Reason.PAGES_CORRUPT: "The pages that landed differ from what was computed. They were not served. Look"
    " at the link and the memory of the two hosts.",
    Reason.RECEIVER_CLOSED: "The decode worker gave the room up first: its own lines say why.",
    Reason.MEMORY_REVOKED: "The decode worker took its exposed memory back because some other sender neither"
    " answered nor was known to be dead. Look for a prefill worker that is stopped or cut off.",
    Reason.ENGINE_FAILED: "A step of the model raised an error; the worker's log has it in full.",
    Reason.GRAMMAR_FAILED: "The worker that drew could not hold the answer to what its request asked for, or"
    " not any further; the text says why. Another worker would say the same.",
    Reason.GROUP_BROKEN: "A rank of the worker died, did not answer in time, or disagreed. The text names the"
    " rank and the turn; the whole worker is started again.",
    Reason.DRAINING: "The worker was about to stop.",
    Reason.REFUSED: "The worker did not take the room; the text says why.",
}

ENDS_SENTENCE: Final = (".", "!", "?")


def why(cause: Cause | None) -> Why | None:
    return None if cause is None else Why(cause.reason.value, cause.text, MEANING[cause.reason])


def told_ms(ms: float) -> str:
    """A duration in the unit that it is read in."""
    if ms < 10:
        return f"{ms:.1f} ms"
    return f"{ms:,.0f} ms" if ms < 10_000 else f"{ms / 1000:,.1f} s"


def headline(
    state: State, rooms: Sequence[RoomEntry], total_ms: float, first_ms: float | None, tokens: str, said: str
) -> str:
    """`tokens`: what the bootstrap says that it passed on; `said`: why there is no other room, if it does."""
    last = rooms[-1]
    cause = last.cause.text if last.cause is not None else ""
    first = "" if first_ms is None else f"; the first token came after {told_ms(first_ms)}"
    match state:
        case State.ANSWERED:
            text = f"Answered in {told_ms(total_ms)}{first}"
            text += f"; {tokens}" if tokens else ""
        case State.FAILED:
            text = f"Failed after {told_ms(total_ms)}: {cause}"
            text += f"; not retried: {said}" if said and said not in cause else ""
            text += f"; {tokens}" if tokens else ""
        case State.GONE:
            text = f"The client hung up after {told_ms(total_ms)}{first or ', before the first token'}"
            text += f"; {tokens}" if tokens and first else ""
        case State.STREAMING:
            text = f"Streams since {told_ms(total_ms - (first_ms or 0.0))}{first}"
        case State.RETRYING:
            text = f"Its room failed, and it may go on in another: {cause}"
        case _:
            text = f"Waits for its first token since {told_ms(total_ms)}"
    return _sentence(text) + _rooms(rooms)


def _rooms(rooms: Sequence[RoomEntry]) -> str:
    """What came before the last room."""
    failed = [entry for entry in rooms[:-1] if entry.cause is not None]
    if not failed:
        return ""
    first = failed[0].cause
    text = "" if first is None else first.text
    count = "A room" if len(failed) == 1 else f"{len(failed)} rooms"
    return f" {count} failed before this one, which went on for it: {_sentence(text)}"


def _sentence(text: str) -> str:
    return text if text.endswith(ENDS_SENTENCE) else f"{text}."
