"""Decisions of the leader to compute a room's prompt on the decode worker itself.

A decision reaches all ranks as a command, before the room is granted. A room is considered when it opens, and
then at intervals while it waits for pages.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from baton.decode.decode_room import DecodeRoom
from baton.handover.receiving_side import ReceivingSide
from baton.rooms.phases import Phase
from baton.rooms.receiver import UNDECIDED
from baton.rooms.steps.local_prefill import ConcurrentDecode, JoiningRoom, PromptTiming, choose_local_prefill
from baton.runtime.clock import Clock
from baton.wire.baton.v1 import group_pb2

BEFORE: Final = UNDECIDED | {Phase.COMPUTING}
"""Phases of a room that is not decoding yet and whose prompt this worker computes, or may still choose to
compute."""
TO_RUN: Final = UNDECIDED | {Phase.TRANSFERRING}
"""Phases of a room that is not decoding yet and whose KV comes, or may come, from a prefill worker."""
COMMAND_MS: Final = 200
"""Least milliseconds between two commands that change the prompt tokens per step."""
NEARER: Final = 8
"""Denominator of a decrease of the limit on prompt tokens per step that is sent at once: by an eighth or
more. Smaller changes wait for COMMAND_MS."""
LOOK_MS: Final = 50
"""Least milliseconds between two decisions where a room's prompt is computed. Each decision looks up the
cached part of the prompt."""


class PromptClaims:
    def __init__(
        self, receiving: ReceivingSide[DecodeRoom], pace: PromptTiming, max_running: int, clock: Clock
    ) -> None:
        """Start without decisions. `pace`: measured speed at which this worker computes prompts.
        `max_running`: most sequences of a step."""
        self._receiving = receiving
        self._max_running = max_running
        self.pace = pace
        self._clock = clock
        self.next_command_ms = 0

    def due(self) -> Iterator[group_pb2.ComputeHere]:
        """Yield the commands that are due now. They let this worker compute a room's prompt, or change the
        limit on prompt tokens per step."""
        rooms = [room for room in self._receiving.roster if room.phase in BEFORE]
        if not rooms:
            return
        now_ms = self._clock.now_ms()
        local = [room for room in rooms if room.local and room.cause is None and not room.complete]
        ahead = sum(room.request.prefill_tokens - room.computed for room in local)
        yield from self._pace_commands(local, now_ms)
        looked_at = [room for room in rooms if room.phase in UNDECIDED and self._is_due(room, now_ms)]
        if not looked_at:
            return
        beside = self._beside(local, now_ms)
        near = self._near_tokens(now_ms)
        for room in looked_at:
            room.look_again_ms = now_ms + LOOK_MS
            known, request = room.request.prefill_tokens, room.request
            missing = known - self._receiving.holdings.cached(request.tokens[:-1], request.salt)
            prefill_ms = (room.prefill_by_ms or now_ms) - now_ms
            why = choose_local_prefill(self.pace, missing, known, ahead, prefill_ms, beside)
            if why is None:
                continue
            ahead += missing
            _relieve(rooms, room)
            local.append(room)
            beside = self._beside(local, now_ms)
            yield self._command(room, near, str(why))

    def _pace_commands(self, local: Sequence[DecodeRoom], now_ms: int) -> Iterator[group_pb2.ComputeHere]:
        """Yield a command with the new limits on prompt tokens per step, if they changed. `local`: rooms
        whose prompts are computed here."""
        receiving = self._receiving
        if not local:
            return
        near, before = self._near_tokens(now_ms), receiving.near_tokens
        if near >= before or (near > self.pace.beside_tokens and (before - near) * NEARER < before):
            same = (self.pace.beside_tokens, near) == (receiving.beside_tokens, before)
            if same or now_ms < self.next_command_ms:
                return
        self.next_command_ms = now_ms + COMMAND_MS
        yield self._command(local[0], near)

    def _command(self, room: DecodeRoom, near: int, why: str = "") -> group_pb2.ComputeHere:
        beside = self.pace.beside_tokens
        return group_pb2.ComputeHere(room=room.id, chunk_tokens=beside, near_tokens=near, why=why)

    def _beside(self, local: Sequence[DecodeRoom], now_ms: int) -> ConcurrentDecode:
        """Return the sequences that would decode in the same steps while this worker computes one more
        prompt.

        `local`: rooms whose prompts this worker computes before it. They count as decoding, as do running
        rooms and rooms that are handed over meanwhile.
        """
        runs = [*(room for room in self._receiving.roster if room.runs and room.cause is None), *local]
        joins = [room for room in self._handed_over() if room.cause is None and room not in local]
        return ConcurrentDecode(
            sum(len(room.ends.going_on) for room in runs),
            max(map(_steps, runs), default=0),
            sorted(JoiningRoom(_left_ms(each, now_ms), each.request.choices, _steps(each)) for each in joins),
            self._max_running,
        )

    def _handed_over(self) -> Iterator[DecodeRoom]:
        """Yield the rooms that are not decoding yet and whose KV comes, or may come, from a prefill
        worker."""
        return (room for room in self._receiving.roster if room.phase in TO_RUN and not room.local)

    def _near_tokens(self, now_ms: int) -> int:
        """Return the limit on prompt tokens of a step while no sequence runs. A step of this size ends about
        when the next room begins to decode."""
        within = (self.pace.tokens_within(_left_ms(room, now_ms)) for room in self._handed_over())
        return min(within, default=self.pace.alone_tokens)

    def _is_due(self, room: DecodeRoom, now_ms: int) -> bool:
        """Return whether it is time to decide where a room's prompt is computed. Scored prompts are always
        left to prefill workers (`scored-is-computed`)."""
        is_known = room.prefill_by_ms is not None and room.request.prompt_logprobs is None
        return is_known and not room.local and room.cause is None and now_ms >= room.look_again_ms


def _left_ms(room: DecodeRoom, now_ms: int) -> int:
    """Return the milliseconds until the prefill worker is expected to finish a room's prompt. 0 if not
    known."""
    return 0 if room.prefill_by_ms is None else room.prefill_by_ms - now_ms


def _steps(room: DecodeRoom) -> int:
    """Return the largest number of decode steps that a room may still take."""
    return room.request.max_tokens - min(map(len, room.outputs))


def _relieve(rooms: Iterable[DecodeRoom], claimed: DecodeRoom) -> None:
    """Lower the expected prefill times of the rooms that wait at the same prefill worker after a room that
    this worker now computes."""
    for room in rooms:
        if room.peer == claimed.peer and room.id > claimed.id and room.prefill_by_ms is not None:
            room.prefill_by_ms -= claimed.prefill_own_ms
