"""Check of landed pages against their sender's checksum, for every room with `--kv-checksum pages`.

When the seal of a room was seen, its pages are summed on the engine's thread. The seal counts as evidence
only if the sum is equal, so that no rank admits wrong pages (`stale-never-served`).

Sums and engine steps alternate: a sum waits for one step at most, and a step for one sum, whatever other
ranks do.
"""

from typing import Final

from baton.decode.decode_room import DecodeRoom
from baton.engine_interface import PageSum, PageSumRequest
from baton.handover.receiving_side import ReceivingSide
from baton.rooms.errors import Reason
from baton.worker.step_thread import StepFailed, StepThread

BYTES_AT_A_TIME: Final = 64 * 2**20
"""Most bytes of pages, over all rooms, whose checksum is computed between two engine steps."""


class PageCheck:
    """Computation of checksums of landed pages on the engine's thread, between steps. How far a room's
    checksum is computed is in the room's record."""

    def __init__(self, receiving: ReceivingSide[DecodeRoom], step_thread: StepThread) -> None:
        self._receiving = receiving
        self._step_thread = step_thread
        token_bytes = sum(group.token_bytes for group in receiving.layout.groups)
        self._tokens_at_a_time = max(BYTES_AT_A_TIME // max(token_bytes, 1), 1)
        self._summing: list[DecodeRoom] = []
        self._step_is_due = False

    def begin(self, room: DecodeRoom, first_token: int) -> None:
        """Begin the checksum of a room's landed pages, from token `first_token` on."""
        room.landed = PageSum(first_token)

    def start(self, *, batch_waits: bool) -> None:
        """Continue to compute checksums if the engine is free. `batch_waits`: whether an engine step waits,
        too. Then steps and checksums alternate."""
        if not self._step_thread.free or (batch_waits and self._step_is_due):
            return
        parts: list[PageSumRequest] = []
        left = self._tokens_at_a_time
        for room in self._receiving.roster:
            if left == 0:
                break
            if room.landed is None or not room.undecided:
                continue
            stop = min(room.landed.stop + left, room.request.prefill_tokens)
            left -= stop - room.landed.stop
            ends = stop == room.request.prefill_tokens
            parts.append(PageSumRequest(room.landed, room.tables(0), stop, ends=ends))
            self._summing.append(room)
            room.busy = True
        if parts:
            self._step_thread.start_sum(parts)

    def stepped(self) -> None:
        """Record that an engine step was started. The next turn in which the engine is free may compute a
        checksum."""
        self._step_is_due = False

    def take(self) -> bool:
        """Take the results of checksums that have ended. Return whether the checksum of some room is now
        complete, or has failed."""
        failure: StepFailed | None = None
        try:
            if not self._step_thread.take_sum():
                return False
        except StepFailed as error:
            failure = error
        self._step_is_due = True
        summed, self._summing = self._summing, []
        news = False
        for room in summed:
            room.busy = False
            if room.landed is None or not room.undecided:
                continue
            if failure is not None:
                self._receiving.fail(room, Reason.ENGINE_FAILED, f"decode: {failure}")
            elif room.landed.stop == room.request.prefill_tokens:
                self._receiving.summed(room, room.landed.total)
            else:
                continue
            news = True
        return news
