"""Scheduling of prefill steps: chunks of prompts, and their results."""

from typing import Final

from baton.engine_interface import DrawFailed
from baton.handover.sending_side import SendingSide
from baton.prefill.metrics import PrefillMetrics
from baton.prefill.prefill_room import PrefillRoom
from baton.rooms.plurals import counted
from baton.rooms.steps.step_cost import PROMPTS, PROMPTS_ALIKE, StepCost
from baton.rooms.steps.token_rate import TokenRate
from baton.rooms.timeline import Moment
from baton.wire.baton.v1 import inference_pb2
from baton.wire.conversions import finish_to_wire, token_to_wire
from baton.worker.assembly import RankPorts
from baton.worker.prompt_budget import PromptBudget
from baton.worker.prompt_chunks import PromptChunk, next_chunks
from baton.worker.step_scheduler import StepScheduler

RATED_TOKENS: Final = 64
"""Fewest tokens of a step that counts for the measured token rate. Smaller steps take longer per token."""
CHUNK_LINES_MAX: Final = 64
"""Most lines about computed chunks in one room's timeline."""


class PrefillScheduler(StepScheduler[PromptChunk[PrefillRoom]]):
    def __init__(
        self,
        sending: SendingSide[PrefillRoom],
        ports: RankPorts,
        metrics: PrefillMetrics,
        chunk_tokens: int,
        scored_tokens: int,
        prompt_budget: PromptBudget,
    ) -> None:
        """Make a scheduler.

        `chunk_tokens`: most prompt tokens of a step. `scored_tokens`: most of them that score a prompt.
        `prompt_budget`: may lower `chunk_tokens` from step to step.
        """
        super().__init__(sending, ports, metrics, StepCost(PROMPTS, PROMPTS_ALIKE))
        self.rate = TokenRate(min(RATED_TOKENS, chunk_tokens))
        self._sending = sending
        self._metrics = metrics
        self._chunk_tokens = chunk_tokens
        self._scored_tokens = scored_tokens
        self._prompt_budget = prompt_budget
        self._left = chunk_tokens
        """Most prompt tokens that the running step could have: the prompt budget's answer when it started."""

    def start(self) -> None:
        """Start the next step if a prompt is to be computed. Call it only while `free`."""
        self._sending.store_states()
        computable = (room for room in self._sending.roster if room.computable)
        self._left = self._prompt_budget.chunk_tokens(self._chunk_tokens)
        costs = self.cost.agreed
        parts = next_chunks(
            computable,
            self._left,
            self._scored_tokens,
            fixed_tokens=costs.fixed_tokens,
            score_price=costs.score_price,
            whole=self._ports.bounds.whole_prompts,
            ends=lambda room: room.stored or (),
        )
        self._start(parts, [part.row for part in parts])

    def observe(self) -> bool:
        """Process the results of a step that has ended. Return False if none has."""
        ended, now_ms = self._take(), self._ports.clock.now_ms()
        if ended is None:
            if self.goes_on:
                self._sending.stepping(now_ms)
            return False
        step, drawn = ended
        computed, scored = sum(part.stop - part.start for part in step), sum(part.scored for part in step)
        tokens = self.cost.agreed.tokens(computed, scored)
        self.rate.stepped(tokens, self.running_us, now_ms, most=self._left)
        if computed:
            self._prompt_budget.stepped(tokens, self.computing_us / 1000)
            self.cost.note(computed, self.computing_us / 1000, scored)
        for part, taken in zip(step, drawn, strict=True):
            if isinstance(taken, DrawFailed):
                self._fail(part, taken)
                continue
            first = taken[0] if taken else None
            self._metrics.computed(part.stop - part.start, part.scored)
            self.tokens += part.stop - part.start
            if self._sending.computed(part.room, part.stop, first, now_ms):
                self._computed(part.room)
        self._sending.stepping(now_ms)
        return True

    def _computed(self, room: PrefillRoom) -> None:
        """Report to the timeline that a chunk of the room's prompt is computed. After the last chunk, send
        the caller the first token."""
        if room.first is None:
            # Chunk lines of a long prompt must not displace later lines.
            if room.computed - room.reported_tokens >= room.request.prefill_tokens / CHUNK_LINES_MAX:
                room.reported_tokens = room.computed
                self._ports.reporter.report(room.id, Moment.CHUNK_COMPUTED, f"{room.computed} tokens so far")
            return
        spent_ms = sum(room.phase_ms.values()) + self._ports.clock.now_ms() - room.entered_ms
        self._metrics.first_token(spent_ms / 1000)
        room.reply_scores()
        finish = finish_to_wire(room.request.finish_reason([*room.request.output, room.first.id]))
        token = token_to_wire(room.first)
        first = inference_pb2.FirstToken(token=token, finish=finish, cached_tokens=room.cached)
        room.reply(inference_pb2.RunRoomReply(first_token=first))
        detail = f"{room.computed - room.cached} tokens computed, {room.cached} cached"
        if room.sequence.scores is not None:
            detail += f", {counted(room.scored, 'token')} of the prompt scored"
        self._ports.reporter.report(room.id, Moment.FIRST_TOKEN, detail)
