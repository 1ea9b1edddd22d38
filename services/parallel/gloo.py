"""Rank group over gloo, with one process per rank.

Followers send to the leader, which answers all of them. So an agreement takes two steps for any number of
ranks. Gloo's own all-reduce goes around the ring twice. The benchmark `agree` prints the times of both. The
group is not torch's default group, so it shares no time-out with the engine's group. No process spins: an
idle group costs nothing.

`gloo_exchange` carries the bytes, `rendezvous` connects the ranks, and `failure_detector` finds why a group
breaks.
"""

import asyncio
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import torch

from baton.parallel.checks import BallotShape, check_commands, check_gathered, check_rank
from baton.parallel.failure_detector import FailureDetector, Whereabouts
from baton.parallel.gloo_exchange import GlooExchange
from baton.parallel.rank_group import COMMAND_BYTES_MAX, GATHER_BYTES_MAX, GroupBroken
from baton.parallel.rendezvous import Rendezvous, Store, meet

FRAME_BYTES: Final = 1024
"""Bytes of the first part of a message, which has a fixed size: the message's length, and as much of the
message as fits."""
LENGTH_BYTES: Final = 8
IN_FRAME_BYTES: Final = FRAME_BYTES - LENGTH_BYTES
LAST_WORDS_S: Final = 1.0
"""Seconds for which a collective may still complete after the group has ended. The rank that left may have
done its part of it."""


class Tag(IntEnum):
    """Kind of a gloo message. If ranks make different calls, they time out, and none takes one kind for
    another."""

    LENGTHS = 1
    BALLOT = 2
    COMMANDS = 3
    GATHERED = 4


class GlooGroup:
    """Rank group with one gloo process per rank (`baton.parallel.rank_group.RankGroup`). Made by `join`."""

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_s: float,
        where: Whereabouts,
        watch: FailureDetector,
        exchange: GlooExchange,
    ) -> None:
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._where = where
        self._watch = watch
        self._exchange = exchange
        self._store: Store | None = None
        self._shape = BallotShape()
        self._turns = 0
        """Number of agreements that the group has completed, for error texts."""
        self._unanswered = False
        """Whether the leader has sent commands and the followers' receipt is not confirmed yet."""
        self._broken: str | None = None
        watch.on_over = self._over
        if watch.over is not None:
            self._over(watch.over)

    @classmethod
    async def join(
        cls, rank: int, size: int, host: str, port: int, timeout_s: float, meet_s: float | None = None
    ) -> "GlooGroup":
        """Connect to the other ranks at `host:port`, where rank 0 listens, and wait for all of them.

        `timeout_s`: bound for the connections and for every collective. `meet_s`: longest wait for the other
        ranks, in seconds; `timeout_s` if None. A rank listens only at the address from which it reaches rank
        0. (torch's variable GLOO_SOCKET_IFNAME names another network.) Raises GroupBroken if not all ranks
        arrive in time or the address cannot be used. Raises ValueError for an impossible rank.
        """
        check_rank(rank, size)
        where = Whereabouts()
        at = Rendezvous(host, port)
        store, watch, group = await meet(rank, size, at, timeout_s, meet_s or timeout_s, where)
        joined = cls(rank, size, timeout_s, where, watch, GlooExchange(group, timeout_s))
        # Rank 0 serves the store while the group lives, because other groups of the worker meet there, too.
        joined._store = store
        return joined

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def broken(self) -> str | None:
        return self._broken

    async def agree(self, ballot: Sequence[int]) -> list[int]:
        self._open()
        first = self._shape.words is None
        self._shape.check(ballot)
        self._enter("agreement", self._turns + 1)
        if first:
            least, most = await self._least([len(ballot), -len(ballot)], Tag.LENGTHS)
            if least != -most:
                raise self._break(f"ranks brought ballots of {least} to {-most} words")
        agreed = await self._least(ballot, Tag.BALLOT)
        self._turns += 1
        return agreed

    async def broadcast(self, commands: bytes | None) -> bytes:
        self._open()
        check_commands(self._rank, commands)
        self._enter("broadcast", self._turns + 1)
        if commands is not None:
            if self._unanswered and self._exchange.under_way:
                await self._end()  # sends of an earlier broadcast without an agreement after it
            # The next agreement proves that the commands have arrived. It also proves that the last verdict
            # has, which may still be on its way.
            self._unanswered = True
            self._send_to_all(_frame(commands), Tag.COMMANDS)
            if len(commands) > IN_FRAME_BYTES:
                self._send_to_all(_tensor(commands[IN_FRAME_BYTES:]), Tag.COMMANDS)
            return commands
        frame = await self._received(FRAME_BYTES, Tag.COMMANDS)
        length = self._length(frame, 0, COMMAND_BYTES_MAX)
        if length <= IN_FRAME_BYTES:
            return frame[LENGTH_BYTES : LENGTH_BYTES + length]
        return frame[LENGTH_BYTES:] + await self._received(length - IN_FRAME_BYTES, Tag.COMMANDS)

    async def gather(self, data: bytes) -> list[bytes]:
        self._open()
        check_gathered(data)
        self._enter("gathering", self._where.turn)
        if self._rank:
            self._open().send(_frame(data), 0, Tag.GATHERED)
            if len(data) > IN_FRAME_BYTES:
                self._open().send(_tensor(data[IN_FRAME_BYTES:]), 0, Tag.GATHERED)
            lengths = await self._received(LENGTH_BYTES * self._size, Tag.GATHERED)
            each = [self._length(lengths, rank, GATHER_BYTES_MAX) for rank in range(self._size)]
            whole = await self._received(sum(each), Tag.GATHERED) if sum(each) else b""
            starts = [sum(each[:rank]) for rank in range(self._size)]
            return [whole[start : start + length] for start, length in zip(starts, each, strict=True)]
        gathered = await self._gathered(data)
        self._send_to_all(_tensor(b"".join(map(_length_bytes, gathered))), Tag.GATHERED)
        if any(gathered):
            self._send_to_all(_tensor(b"".join(gathered)), Tag.GATHERED)
        return gathered

    async def close(self) -> None:
        if self._broken is None and self._exchange.under_way:
            # The last verdict may still be on its way to ranks that wait for it.
            await self._exchange.end(LAST_WORDS_S)
        self._break(f"rank {self._rank} has left the group")
        self._store = None

    async def _least(self, words: Sequence[int], tag: Tag) -> list[int]:
        """Return the element-wise minimum of `words` over all ranks."""
        mine = torch.frombuffer(array("q", words), dtype=torch.int64)
        if self._rank:
            agreed = torch.empty_like(mine)
            # The receive comes first, so that it is ready before the leader can answer.
            self._open().receive(agreed, 0, tag)
            self._open().send(mine, 0, tag)
            await self._end()
        elif self._size > 1:
            rows = torch.empty(self._size, len(words), dtype=torch.int64)
            rows[0] = mine
            for rank in range(1, self._size):
                self._open().receive(rows[rank], rank, tag)
            await self._end()
            agreed = rows.amin(0)
            self._send_to_all(agreed, tag)
        else:
            agreed = mine
        least: list[int] = agreed.tolist()
        return least

    async def _gathered(self, mine: bytes) -> list[bytes]:
        """Run the leader's part of a gather. Return the bytes of every rank, in rank order."""
        frames = torch.empty(self._size, FRAME_BYTES, dtype=torch.uint8)
        for rank in range(1, self._size):
            self._open().receive(frames[rank], rank, Tag.GATHERED)
        await self._end()
        gathered, rests = [mine], []
        for rank in range(1, self._size):
            frame = frames[rank].numpy().tobytes()
            length = self._length(frame, 0, GATHER_BYTES_MAX)
            gathered.append(frame[LENGTH_BYTES : LENGTH_BYTES + length])
            if length > IN_FRAME_BYTES:
                rest = torch.empty(length - IN_FRAME_BYTES, dtype=torch.uint8)
                self._open().receive(rest, rank, Tag.GATHERED)
                rests.append((rank, rest))
        if rests:
            await self._end()
        for rank, rest in rests:
            gathered[rank] += rest.numpy().tobytes()
        return gathered

    def _send_to_all(self, tensor: torch.Tensor, tag: Tag) -> None:
        for rank in range(1, self._size):
            self._open().send(tensor, rank, tag)

    async def _received(self, length: int, tag: Tag) -> bytes:
        tensor = torch.empty(length, dtype=torch.uint8)
        self._open().receive(tensor, 0, tag)
        await self._end()
        data: bytes = tensor.numpy().tobytes()
        return data

    def _length(self, frame: bytes, place: int, most: int) -> int:
        start = place * LENGTH_BYTES
        length = int.from_bytes(frame[start : start + LENGTH_BYTES], "little")
        if length > most:
            raise self._break(f"a message of {length} bytes was announced; at most {most} are possible")
        return length

    def _enter(self, call: str, turn: int) -> None:
        self._where.collective += 1
        self._where.call = call
        self._where.turn = turn

    async def _end(self) -> None:
        """Wait for all sends and receives that were started. Raises GroupBroken."""
        exchange = self._open()
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            problem = await exchange.end()
        except asyncio.CancelledError:
            # The exchange goes on without its caller, so this rank does not know the agreed result.
            self._break(f"rank {self._rank} was cancelled while it waited")
            raise
        self._unanswered = False
        if problem is not None:
            in_time = loop.time() - started < self._timeout_s
            how = f"({problem})" if in_time else f"within {self._timeout_s:g} s"
            raise GroupBroken(await self._watch.blame(how))

    def _open(self) -> GlooExchange:
        """Return the exchange that sends and receives. Raises GroupBroken if the group has ended."""
        if self._broken is not None:
            raise GroupBroken(self._broken)
        return self._exchange

    def _break(self, why: str) -> GroupBroken:
        """End the group because this rank cannot go on, and send the reason to the other ranks. Return the
        error to raise."""
        self._watch.leave(why)
        return GroupBroken(self._broken)

    def _over(self, why: str) -> None:
        """Record the reason why the rank group has ended, and close its connections."""
        self._broken = why
        self._exchange.give_up(LAST_WORDS_S, why)
        self._exchange.close()


def _frame(message: bytes) -> torch.Tensor:
    head = _length_bytes(message) + message[:IN_FRAME_BYTES]
    return _tensor(head.ljust(FRAME_BYTES, b"\0"))


def _length_bytes(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH_BYTES, "little")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
