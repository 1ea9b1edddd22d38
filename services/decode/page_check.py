"""Do the pages that landed hold what their sender computed? Asked of every room with `--kv-checksum pages`.

A room whose seal was seen has its pages summed on the engine's thread, and its seal is noted when the sum is
the sender's: pages that do not hold are never voted for, so that no rank admits them (`stale-never-served`).

Sums and steps take turns: neither waits for more than one of the other, whatever the rank beside it does.
"""

from typing import Final

from baton.decode.decode_room import DecodeRoom
from baton.engine_interface import PageSum, PageSumRequest
from baton.handover.receiving_side import ReceivingSide
from baton.rooms.errors import Reason
from baton.worker.step_thread import StepFailed, StepThread

BYTES_AT_A_TIME: Final = 64 * 2**20
"""Of pages summed before the batch has its next step; of all rooms together."""


class PageCheck:
    """Keeps nothing of a room but in its record."""

    def __init__(self, receiving: ReceivingSide[DecodeRoom], step_thread: StepThread) -> None:
        self._receiving = receiving
        self._step_thread = step_thread
        self._tokens_at_a_time = max(
            BYTES_AT_A_TIME // sum(group.token_bytes for group in receiving.layout.groups), 1
        )
        self._summing: list[DecodeRoom] = []
        self._step_is_due = False

    def begin(self, room: DecodeRoom, first_token: int) -> None:
        """Its pages are to be summed from this token on."""
        room.landed = PageSum(first_token)

    def start(self, *, batch_waits: bool) -> None:
        """Sum more of what has landed, if the engine is free. `batch_waits`: there is a step to compute."""
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
            parts.append(PageSumRequest(room.landed, room.tables(0), stop))
            self._summing.append(room)
            room.busy = True
        if parts:
            self._step_thread.start_sum(parts)

    def stepped(self) -> None:
        """A step was started."""
        self._step_is_due = False

    def take(self) -> bool:
        """Whether sums are complete, or failed, that were not when this was asked last."""
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
