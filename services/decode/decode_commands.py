"""Handlers of the commands that only a decode worker has. Every rank applies the same commands."""

from typing import Any

from baton.decode.decode_room import DecodeRoom, replayed
from baton.handover.receiving_side import ReceivingSide
from baton.ids import Generation, Incarnation, Opener, RoomId
from baton.rooms.errors import Refusal
from baton.rooms.steps.step_cost import StepCost
from baton.wire.baton.v1 import group_pb2, inference_pb2
from baton.wire.conversions import Malformed
from baton.worker.assembly import RankPorts
from baton.worker.callers import Callers
from baton.worker.rank_commands import RankCommands


class DecodeCommands(RankCommands[ReceivingSide[DecodeRoom]]):
    def __init__(
        self,
        core: ReceivingSide[DecodeRoom],
        callers: Callers[Any],
        ports: RankPorts,
        cost: StepCost,
    ) -> None:
        super().__init__(core, callers, ports, cost)

    def _apply(self, what: str | None, command: group_pb2.Command) -> bool:
        match what:
            case "stream":
                self._stream(command.stream)
            case "connected":
                self._core.connected(Incarnation(command.connected))
            case "quiet":
                self._core.quiet(RoomId(command.quiet.room), Generation(command.quiet.generation))
            case "end_choice":
                self._cut(command.end_choice)
            case "compute_here":
                compute_here = command.compute_here
                self._core.compute_here(
                    RoomId(compute_here.room),
                    compute_here.chunk_tokens,
                    compute_here.near_tokens,
                    compute_here.why,
                )
            case "revoke":
                self._core.revoke()
            case _:
                return False
        return True

    def _stream(self, wire: inference_pb2.StreamRoomRequest) -> None:
        if not wire.HasField("prefill") and wire.request.HasField("prompt_logprobs"):
            raise Refusal("a prompt is scored by a prefill worker, and there is none")  # `scored-is-computed`
        if self._ports.bounds.whole_prompts and wire.request.further_seeds:
            raise Refusal("the engine computes a prompt as a whole: a room has one choice")
        room: DecodeRoom = self._open(wire, wire.prefill if wire.HasField("prefill") else None, "prefill")
        room.prefill.CopyFrom(wire.prefill)
        if wire.HasField("prefill_ms"):
            room.prefill_by_ms = self._ports.clock.now_ms() + wire.prefill_ms
            room.prefill_own_ms = wire.prefill_own_ms

    def _adopt(self, wire: inference_pb2.AdoptRequest) -> None:
        room: DecodeRoom = self._give(wire, None)
        for choice in room.choices:
            if choice.sequence.output:
                room.reply(inference_pb2.StreamRoomReply(tokens=replayed(room, choice)))
        if room.concluded:
            room.conclude(None)

    def _cut(self, wire: inference_pb2.EndChoiceRequest) -> None:
        room, rooms, opener = RoomId(wire.room), self._core.roster, Opener(wire.opener)
        if room in rooms and wire.choice >= rooms.get(room).request.choices:
            raise Malformed(f"choice {wire.choice} of a room that has {rooms.get(room).request.choices}")
        self._core.cut(room, wire.choice, opener)
        if self._core.has_room(room, opener):
            self._ports.step_thread.release(rooms.get(room).choices[wire.choice].sequence)
