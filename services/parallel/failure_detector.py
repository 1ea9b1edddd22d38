"""Failure detector: finds which rank is the cause when the ranks of a worker can no longer agree.

Besides its collectives, a group has one plain TCP connection from every follower to the leader. If a process
dies, its connection closes at once. If a process is stopped, its connection stays open and it does not
answer. A process that works, but has not entered the collective in which the others wait, reports that. The
leader concludes which rank is the cause, and sends all ranks the same text. The followers judge the leader
itself by the same signs.

```
follower -> leader    hello <token> <rank> <size>   failed <collective> <call> <how>
                      at <collective>   left <text>
leader -> follower    ready   where   over <text>
```

Everything here runs on the event loop and waits for nothing longer than `ANSWER_S`.
"""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.parallel.control_line import ControlLine

ANSWER_S: Final = 1.0
"""Seconds within which a rank has to report its position after a collective has failed on another rank."""
LEADER_ANSWER_S: Final = 1.5
"""Seconds within which the leader has to tell a follower the cause of a failed collective. It is longer than
ANSWER_S because the leader inquires of the other ranks first."""
STRANGERS_MAX: Final = 64
"""Most open connections whose other end has not sent its rank yet."""

OnOver = Callable[[str], None]


@dataclass(slots=True)
class Whereabouts:
    """Position of this rank in the sequence of collectives. The rank group updates it, and the rank's failure
    detector reports it."""

    collective: int = 0
    """Number of collectives that this rank has entered."""
    turn: int = 0
    call: str = "meeting"

    def describe(self, text: str) -> str:
        return f"turn {self.turn}: {text}" if self.turn else text


class FailureDetector(ABC):
    """Base class of the failure detectors of the leader and the followers. It holds the text that says why
    the rank group has ended."""

    def __init__(self, where: Whereabouts, size: int, timeout_s: float) -> None:
        self.where = where
        self.size = size
        self.timeout_s = timeout_s
        self.over: str | None = None
        """Text that says why the group of ranks has ended, or None while it lives."""
        self.on_over: OnOver | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def blame(self, how: str) -> str:
        """Report that a collective failed on this rank, and return a text that names the cause.

        The wait for that text is bounded. `how`: how the collective failed, for the text.
        """
        if self.over is None:
            self._inquire(self.where.collective, self.where.call, how)
        return await asyncio.shield(self._ended)

    @abstractmethod
    def leave(self, text: str) -> None:
        """Send the others why this rank leaves, and close the connections. No effect if the group
        has ended."""

    @abstractmethod
    def _inquire(self, collective: int, call: str, how: str) -> None:
        """Start an inquiry that finds out which rank made a collective fail. Its result comes within a
        bounded time."""

    def _end(self, text: str) -> None:
        if self.over is None:
            self.over = text
            self._ended.set_result(text)
            if self.on_over is not None:
                self.on_over(text)


class LeaderDetector(FailureDetector):
    """Failure detector of the leader (rank 0), with the connections of all followers."""

    def __init__(self, where: Whereabouts, size: int, timeout_s: float) -> None:
        super().__init__(where, size, timeout_s)
        self._token = secrets.token_hex(8)
        self._ranks: dict[int, ControlLine] = {}
        self._strangers: set[ControlLine] = set()
        self._server: asyncio.Server | None = None
        self._complete = asyncio.Event()
        self._unanswered: set[int] | None = None
        """Ranks that have not answered the current inquiry yet. None if there was no inquiry."""
        self._late: set[int] = set()
        """Ranks that answered the current inquiry that they work, but have not entered the collective that
        failed."""
        self._failed, self._call, self._how = 0, "", ""

    async def listen(self, host: str) -> str:
        """Listen for followers. Return, as one text, the port and the token that each of them has to send."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._called, host, 0)
        return f"{self._server.sockets[0].getsockname()[1]} {self._token}"

    async def meet(self, within_s: float) -> None:
        """Wait until every follower is connected, at most `within_s` seconds.

        Raises TimeoutError, which names the missing ranks.
        """
        try:
            if self.size > 1:
                await asyncio.wait_for(self._complete.wait(), within_s)
        except TimeoutError:
            missing = sorted(set(range(1, self.size)) - set(self._ranks))
            text = f"{names(missing)} did not come within {within_s:g} s"
            self._end(text)
            raise TimeoutError(text) from None
        finally:
            if self._server is not None:
                self._server.close()
        for line in self._ranks.values():
            line.send("ready")

    def leave(self, text: str) -> None:
        self._end(self.where.describe(text))
        for line in self._ranks.values():
            line.close()

    def _called(self) -> ControlLine:
        line = ControlLine(self._received, self._gone)
        if len(self._strangers) < STRANGERS_MAX:
            self._strangers.add(line)
            return line
        return ControlLine(lambda line, *_: line.close(), lambda _: None)

    def _received(self, line: ControlLine, word: str, text: str) -> None:
        if line.rank is None:
            self._introduced(line, word, text)
        elif word == "left" and self._complete.is_set():
            self._end(self.where.describe(text))
        elif word == "failed":
            collective, call, how = text.split(maxsplit=2)
            self._inquire(int(collective), call, how)
            self._answered(line.rank, int(collective))
        elif word == "at":
            self._answered(line.rank, int(text))

    def _introduced(self, line: ControlLine, word: str, text: str) -> None:
        self._strangers.discard(line)
        match word, text.split():
            case "hello", [token, rank, size] if token == self._token and (rank + size).isdecimal():
                problem = self._admit(line, int(rank), int(size))
                if problem is not None:
                    line.send("over", problem)
                    line.close()
            case _:
                line.close()

    def _admit(self, line: ControlLine, rank: int, size: int) -> str | None:
        if self.over is not None:
            return self.over
        if size != self.size:
            return f"rank {rank} was started for a group of {size}, rank 0 for one of {self.size}"
        if rank in self._ranks or not 1 <= rank < self.size:
            return f"rank {rank} is here already, as another process"
        line.rank = rank
        self._ranks[rank] = line
        if len(self._ranks) == self.size - 1:
            self._complete.set()
        return None

    def _gone(self, line: ControlLine) -> None:
        self._strangers.discard(line)
        if line.rank is None or self._ranks.get(line.rank) is not line:
            return
        if not self._complete.is_set():
            del self._ranks[line.rank]  # it may connect again
            return
        self._end(self.where.describe(f"rank {line.rank} has gone (connection closed)"))

    def _inquire(self, collective: int, call: str, how: str) -> None:
        if self._unanswered is not None or self.over is not None:
            return
        self._unanswered = set(self._ranks)
        self._failed, self._call, self._how = collective, call, how
        for line in self._ranks.values():
            line.send("where")
        if self.where.collective < collective:
            self._late.add(0)
        patience_s = min(ANSWER_S, self.timeout_s)
        asyncio.get_running_loop().call_later(patience_s, self._conclude)

    def _answered(self, rank: int, collective: int) -> None:
        if self._unanswered is None:
            return
        self._unanswered.discard(rank)
        if collective < self._failed:
            self._late.add(rank)
        if not self._unanswered:
            self._conclude()

    def _conclude(self) -> None:
        silent = sorted(self._unanswered or ())
        if silent:
            text = f"{names(silent)} did not answer {self._how}"
        elif self._late:
            text = f"{names(sorted(self._late))} did not come to the {self._call} {self._how}"
        else:
            text = f"all ranks are there, but did not reach each other {self._how}"
        self._end(self.where.describe(text))

    def _end(self, text: str) -> None:
        super()._end(text)
        for line in self._ranks.values():
            line.send("over", self.over)


class FollowerDetector(FailureDetector):
    """Failure detector of a follower, with its connection to the leader."""

    def __init__(self, where: Whereabouts, rank: int, size: int, timeout_s: float) -> None:
        super().__init__(where, size, timeout_s)
        self._ready = asyncio.Event()
        self._line = ControlLine(self._received, self._gone)
        self._line.rank = 0
        self._rank = rank

    async def meet(self, host: str, address: str, within_s: float) -> None:
        """Connect to the leader, and wait until all ranks are connected. Raises OSError.

        `address`: port and token, as `LeaderDetector.listen` returned them.
        """
        port, token = address.split()
        loop = asyncio.get_running_loop()
        try:
            # The leader gives up first, because it can name the missing ranks.
            async with asyncio.timeout(within_s + LEADER_ANSWER_S):
                await loop.create_connection(lambda: self._line, host, int(port))
                self._line.send("hello", f"{token} {self._rank} {self.size}")
                await self._ready.wait()
        except ConnectionRefusedError:
            raise ConnectionRefusedError("rank 0 expects no more ranks: the group is complete") from None
        except TimeoutError:
            raise TimeoutError("rank 0 did not say that all ranks are there") from None
        if self.over is not None:
            raise ConnectionAbortedError(self.over)

    def leave(self, text: str) -> None:
        if self.over is None:
            self._line.send("left", text)
        self._end(self.where.describe(text))

    def _received(self, line: ControlLine, word: str, text: str) -> None:
        if word == "ready":
            self._ready.set()
        elif word == "where":
            line.send("at", self.where.collective)
        elif word == "over":
            self._end(text)

    def _gone(self, _: ControlLine) -> None:
        self._end(self.where.describe("rank 0 has gone (connection closed)"))

    def _inquire(self, collective: int, call: str, how: str) -> None:
        self._line.send("failed", f"{collective} {call} {how}")
        text = self.where.describe(f"rank 0 did not answer {how}")
        patience_s = min(LEADER_ANSWER_S, 1.5 * self.timeout_s)
        asyncio.get_running_loop().call_later(patience_s, self._end, text)

    def _end(self, text: str) -> None:
        super()._end(text)
        self._ready.set()
        self._line.close()


def names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
