"""Scheduling of decode steps: rows of unfinished choices and of prompts computed here, and their results."""

from collections.abc import Sequence
from typing import Final, TypeAlias

from baton.decode.batch import ChoiceStep, next_batch
from baton.decode.decode_room import Choice, DecodeRoom
from baton.decode.draft_scheduler import DraftScheduler
from baton.decode.metrics import DecodeMetrics
from baton.engine_interface import DrawFailed, Row
from baton.handover.receiving_side import ReceivingSide
from baton.rooms.request import FinishReason, Token
from baton.rooms.steps.local_prefill import PromptTiming
from baton.wire.baton.v1 import inference_pb2
from baton.wire.conversions import finish_to_wire, token_to_wire
from baton.worker.assembly import RankPorts
from baton.worker.prompt_chunks import PromptChunk, next_chunks
from baton.worker.step_scheduler import StepScheduler

ALONE_TOKENS: Final = 256
"""Most prompt tokens that this decode worker computes in a step without running sequences, which therefore
delays none."""

StepOf: TypeAlias = ChoiceStep | PromptChunk[DecodeRoom]


class DecodeScheduler(StepScheduler[StepOf]):
    def __init__(
        self,
        receiving: ReceivingSide[DecodeRoom],
        ports: RankPorts,
        metrics: DecodeMetrics,
        max_running: int,
        drafting: DraftScheduler,
        local_gap_ms: int,
    ) -> None:
        """Make a scheduler. `max_running`: most sequences of a step. `local_gap_ms`: see
        `PromptTiming.gap_ms`."""
        super().__init__(receiving, ports, metrics, drafting.cost)
        self.drafting = drafting
        self.pace = PromptTiming(local_gap_ms, ALONE_TOKENS, receiving.beside_tokens)
        """Measured speed at which this decode worker computes prompts."""
        self._receiving = receiving
        self._metrics = metrics
        self._max_running = max_running

    def join(self, room: DecodeRoom) -> None:
        """Add the choices of an admitted room to the batch. Choice 0 already has its first token. The other
        choices sample their first token in the next steps."""
        if room.first is None:
            raise AssertionError(f"room {room.id} was admitted without its first token")
        if 0 in room.ends.going_on:
            self._emit(room, room.choices[0], [room.first], self._receiving.drawn(room, 0))

    def start(self) -> tuple[bool, bool]:
        """Start the next step, if there is anything to compute. Call it only while `free`.

        Return two flags: whether a step was started, and whether rooms are retracted (preempted) to make
        space for it.
        """
        step = next_batch(self._receiving.roster, self._max_running)
        wants = [
            (room, choice.place, choice.sequence.length)
            for room, choice in (part for part in step if not part.has_pages)
        ]
        space = self._receiving.space_for(wants)
        if wants:
            step = [part for part in step if part.room.runs and part.has_pages]
        self._metrics.grew(space.given, [room.kv_tokens for room in space.retracted])
        prompts = self._prompts()
        drafted = self.drafting.drafts(step, sum(part.stop - part.start for part in prompts))
        rows = [self._row(part, drafts) for part, drafts in zip(step, drafted, strict=True)]
        started = self._start([*step, *prompts], [*rows, *(part.row for part in prompts)])
        self.drafting.read(step)
        return started, bool(space.retracted)

    def _prompts(self) -> list[PromptChunk[DecodeRoom]]:
        """Return the parts of prompts that the next step computes on this decode worker itself."""
        rooms = [room for room in self._receiving.roster if room.computable]
        if not rooms:
            return []
        receiving, budget = self._receiving, ALONE_TOKENS
        if any(room.runs for room in receiving.roster):
            budget = receiving.beside_tokens
        elif any(room.needs_short_steps for room in receiving.roster):
            budget = receiving.near_tokens
        return next_chunks(rooms, budget, sent=False, whole=self._ports.bounds.whole_prompts)

    def _row(self, part: ChoiceStep, drafts: Sequence[int]) -> Row:
        """Return the engine row of a choice for the next step. `drafts`: draft tokens to verify. Those for
        which no page can be spared are cut off."""
        room, choice = part
        if drafts:
            length = choice.sequence.length
            stop, given = self._receiving.reach(room, choice.place, length + len(drafts))
            self._metrics.grew(given, ())
            drafts = drafts[: stop - length]
        choice.checking = len(drafts)
        return room.row(choice, drafts)

    def observe(self) -> None:
        """Process the results of a step that has ended, if one has. All of its results are processed in this
        turn."""
        ended, now_ms = self._take(), self._ports.clock.now_ms()
        if ended is None:
            if self.goes_on:
                self._receiving.stepping(now_ms)
            return
        step, taken = ended
        choices = [part for part in step if isinstance(part, ChoiceStep)]
        prompts = sum(part.stop - part.start for part in step if isinstance(part, PromptChunk))
        if step:
            self.pace.stepped(prompts, len(choices), self.computing_us / 1000)
        if not prompts:
            self.drafting.stepped(choices, self.computing_us / 1000)
        drawn = 0
        for part, tokens in zip(step, taken, strict=True):
            if isinstance(tokens, DrawFailed):
                self._undrawn(part, tokens)
            elif isinstance(part, PromptChunk):
                self._receiving.computed(part.room, part.stop, tokens[0] if tokens else None)
            else:
                drawn += self._drawn(part, tokens)
        self._metrics.decoded(drawn)
        self._metrics.computed(prompts)
        self.tokens += drawn + prompts
        self._receiving.stepping(now_ms)

    def _undrawn(self, part: StepOf, why: DrawFailed) -> None:
        if isinstance(part, PromptChunk) or part.choice.place in part.room.ends.going_on:
            self._fail(part, why)

    def _drawn(self, part: ChoiceStep, tokens: Sequence[Token]) -> int:
        """Append the sampled tokens of a row to the output of its choice. Return how many were appended.

        It is 0 for a choice whose caller wanted no more meanwhile, while other choices of the room continue.
        """
        room, choice = part
        goes_on = choice.place in room.ends.going_on and not room.stopping
        return self._append(room, choice, tokens) if goes_on else 0

    def _append(self, room: DecodeRoom, choice: Choice, tokens: Sequence[Token]) -> int:
        """Append sampled tokens to a choice until its output is complete, and drop the tokens after that.
        Return how many were appended."""
        if choice.drafter is not None:
            self._metrics.drafted(choice.drafter.source, choice.checking, len(tokens) - 1)
            choice.drafter.note(choice.checking, len(tokens) - 1)
        output, finish = choice.sequence.output, None
        first = len(output)
        for token in tokens:
            output.append(token.id)
            finish = self._receiving.drawn(room, choice.place)
            if finish is not None:
                break
        self._emit(room, choice, tokens[: len(output) - first], finish)
        if finish is not None:
            self._ports.step_thread.release(choice.sequence)
        return len(output) - first

    def _emit(
        self, room: DecodeRoom, choice: Choice, tokens: Sequence[Token], finish: FinishReason | None
    ) -> None:
        """Send the caller the last tokens of a choice that were sampled. `finish`: finish reason if the
        choice ends with them, or None."""
        message = inference_pb2.Tokens(
            first=len(choice.sequence.output) - len(tokens),
            tokens=map(token_to_wire, tokens),
            finish=finish_to_wire(finish),
            cached_tokens=room.cached if room.local else 0,
            local=room.local,
            choice=choice.place,
        )
        room.reply(inference_pb2.StreamRoomReply(tokens=message))
