"""What does a step compute for each choice that goes on, and what comes of it?"""

from collections.abc import Sequence

from services.decode.batch import ChoiceStep, next_batch
from services.decode.drafting import Drafting
from services.decode.metrics import DecodeMetrics
from services.decode.room import Choice, DecodeRoom
from services.engine.interface import Row, Undrawn
from services.handover.receiving import Receiving
from services.rooms.request import FinishReason, Token
from services.wire.baton.v1 import inference_pb2
from services.wire.conversions import finish_to_wire, token_to_wire
from services.worker.parts import RankParts
from services.worker.stepping import Stepping


class DecodeStepping(Stepping[ChoiceStep]):
    def __init__(
        self,
        receiving: Receiving[DecodeRoom],
        parts: RankParts,
        metrics: DecodeMetrics,
        max_running: int,
        drafting: Drafting,
    ) -> None:
        """`max_running`: most sequences that a step continues."""
        super().__init__(receiving, parts, metrics)
        self.drafting = drafting
        self._receiving = receiving
        self._metrics = metrics
        self._max_running = max_running

    def join(self, room: DecodeRoom) -> None:
        """The room was admitted. Choice 0's first token came in the record; the others draw theirs."""
        if room.record is None:
            raise AssertionError(f"room {room.id} was admitted without its record")
        room.begin()
        if 0 in room.ends.going_on:
            record = room.record
            first = Token(record.first_token, record.first_logprob, record.alternatives)
            self._emit(room, room.choices[0], [first], self._receiving.drawn(room, 0))

    def start(self) -> tuple[bool, bool]:
        """Whether there is a next step, which is started, and whether rooms are retracted for it. Only while
        `free`."""
        step = next_batch(self._receiving.roster, self._max_running)
        wants = [
            (room, choice.place, choice.sequence.length)
            for room, choice in (part for part in step if not part.has_pages)
        ]
        space = self._receiving.space_for(wants)
        if wants:
            step = [part for part in step if part.room.runs and part.has_pages]
        self._metrics.grew(space.given, [room.kv_tokens for room in space.retracted])
        drafted = self.drafting.drafts(step)
        rows = [self._row(part, drafts) for part, drafts in zip(step, drafted, strict=True)]
        started = self._start(step, rows)
        self.drafting.read(step)
        return started, bool(space.retracted)

    def _row(self, part: ChoiceStep, drafts: Sequence[int]) -> Row:
        """`drafts`: as many of them as there are pages to spare for."""
        room, choice = part
        if drafts:
            length = choice.sequence.length
            stop, given = self._receiving.reach(room, choice.place, length + len(drafts))
            self._metrics.grew(given, ())
            drafts = drafts[: stop - length]
        choice.checking = len(drafts)
        return choice.row(room.pages[choice.place], drafts)

    def observe(self) -> None:
        """All that follows from a step's end is done in this turn: the next one is not for it."""
        ended = self._take()
        if ended is None:
            return
        step, taken = ended
        self.drafting.stepped(step, self.running_us / 1000)
        count = sum(len(tokens) for tokens in taken if not isinstance(tokens, Undrawn))
        self._metrics.decoded(count)
        self.tokens += count
        for part, tokens in zip(step, taken, strict=True):
            room, choice = part
            if choice.place not in room.ends.going_on:
                continue  # its reader had enough meanwhile, and the others do not end by it
            if isinstance(tokens, Undrawn):
                self._fail(part, tokens)
            elif not room.stopping:
                self._append(room, choice, tokens)

    def _append(self, room: DecodeRoom, choice: Choice, tokens: Sequence[Token]) -> None:
        """They come next, up to the choice's end: what was drawn behind that is dropped."""
        self._metrics.drafted(choice.checking, len(tokens) - 1)
        if choice.drafter is not None:
            choice.drafter.acceptance.note(choice.checking, len(tokens) - 1)
        output, finish = choice.sequence.output, None
        first = len(output)
        for token in tokens:
            output.append(token.id)
            finish = self._receiving.drawn(room, choice.place)
            if finish is not None:
                break
        choice.computed = choice.sequence.length - 1
        self._emit(room, choice, tokens[: len(output) - first], finish)

    def _emit(
        self, room: DecodeRoom, choice: Choice, tokens: Sequence[Token], finish: FinishReason | None
    ) -> None:
        """Send the tokens that the choice's output ends with."""
        told = inference_pb2.Tokens(
            first=len(choice.sequence.output) - len(tokens),
            tokens=map(token_to_wire, tokens),
            finish=finish_to_wire(finish),
            choice=choice.place,
        )
        room.reply(inference_pb2.StreamRoomReply(tokens=told))
