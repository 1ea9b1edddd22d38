"""Simulated network: arrival of messages between hosts, and calls that break on the way.

A connection delivers what it carries, in order within one call and in any order between two, or it breaks:
then every call on it ends UNAVAILABLE at its caller and is cancelled at its server. What is sent while the
way is cut waits for the way to heal, as TCP does; a way that stays cut, or a process that stays paused, for
longer than keepalive breaks the connection.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc

from tests.sim.loop import Life, SimulatedProcess, VirtualLoop
from tests.sim.trace import Trace

if TYPE_CHECKING:
    from tests.sim.calls import SimulatedCall, SimulatedServer

KEEPALIVE_S: Final = 15.0
ROUND_S: Final = 0.00005
"""Seconds of one round of the event loop before a handler gets its message."""
HANDLERS_PART: Final = 3
TURNS_S: Final = 0.3
"""A handler's half of the loop, and a few turns, with something to spare."""
LATE_REQUEST_S: Final = 0.5
LATE_ANSWER_S: Final = 6.0
WITHIN_S: Final = 0.0001
"""Delay of a message from a process to itself, seconds."""
REPEATED: Final = frozenset({"Cancel", "Register", "Renew", "Drain", "ReportRooms", "ReportExit"})
"""Methods that their callers call again when no answer came: the server may see the first one as well."""


@dataclass(frozen=True, slots=True)
class Weather:
    """Shares of calls, and seconds."""

    latency_s: float = 0.002
    slow_share: float = 0.0
    """Share of messages that come far later, so that independent calls overtake each other."""
    slow_s: float = 0.5
    lost_share: float = 0.0
    """Share of calls whose request never arrives."""
    unanswered_share: float = 0.0
    """Share of calls that are carried out, and whose answer never arrives."""
    twice_share: float = 0.0
    """Share of REPEATED calls that arrive a second time, later."""
    late_renewals: bool = False


CALM: Final = Weather()


class Network:
    """Hosts by name, servers by address."""

    def __init__(self, loop: VirtualLoop, trace: Trace, seed: str, weather: Weather) -> None:
        self.loop = loop
        self.trace = trace
        self.weather = weather
        self.handler_rounds = 0
        """Rounds of its process's event loop until a message gets to its handler."""
        self._random = random.Random(f"{seed}/network")
        self._servers: dict[str, SimulatedServer] = {}
        self._calls: dict[int, SimulatedCall] = {}
        self._number = 0
        self.sent: Counter[str] = Counter()
        """Requests, by method."""
        self._cuts: dict[tuple[str, str], int] = {}
        """Ways (from, to) that carry nothing, with the number of reasons for it."""
        self._parked: dict[tuple[str, str], list[Callable[[], None]]] = {}

    # ---- what happens to it

    def cut(self, one: str, other: str, *, both: bool) -> None:
        for way in [(one, other), (other, one)] if both else [(one, other)]:
            self._cuts[way] = self._cuts.get(way, 0) + 1
        self.loop.call_later(KEEPALIVE_S, self._break_if_cut, one, other)

    def mend(self, one: str, other: str, *, both: bool) -> None:
        for way in [(one, other), (other, one)] if both else [(one, other)]:
            self._cuts[way] -= 1
            if not self._cuts[way]:
                del self._cuts[way]
                for message in self._parked.pop(way, []):
                    self.loop.call_soon(message)  # before whatever is sent from now on

    def is_cut(self, source: str, target: str) -> bool:
        return bool(self._cuts) and (source, target) in self._cuts

    def reset(self, one: str, other: str) -> None:
        """Break the connections between two hosts. Nothing that is under way on them arrives."""
        for call in list(self._calls.values()):
            if {call.caller.host, call.host} == {one, other}:
                call.break_off("Connection reset by peer")

    def died(self, process: SimulatedProcess) -> None:
        """Close the connections of an ended process, as its kernel does."""
        for address in [each for each, server in self._servers.items() if server.process is process]:
            del self._servers[address]
        for call in list(self._calls.values()):
            if call.caller is process or call.server_process is process:
                call.break_off("Socket closed")

    def paused(self, process: SimulatedProcess) -> None:
        """Peers notice, by keepalive, if it takes long."""
        self.loop.call_later(KEEPALIVE_S, self._break_if_paused, process)

    # ---- what calls need

    def listen(self, address: str, server: "SimulatedServer") -> None:
        self._servers[address] = server

    def unlisten(self, address: str) -> None:
        self._servers.pop(address, None)

    def serves(self, process: SimulatedProcess) -> bool:
        return any(call.server_process is process for call in self._calls.values())

    def server(self, address: str) -> "SimulatedServer | None":
        return self._servers.get(address)

    def opened(self, call: "SimulatedCall") -> int:
        self._number += 1
        self._calls[self._number] = call
        return self._number

    async def is_listening(self, source: str, address: str) -> bool:
        """Return what a connection from `source` to an address meets. Raises OSError without a route."""
        target = address.partition(":")[0]
        if self.is_cut(source, target) or self.is_cut(target, source):
            raise OSError("no route to host")
        return address in self._servers

    def ended(self, number: int) -> None:
        self._calls.pop(number, None)

    def carry(self, source: str, target: str, message: Callable[[], None], not_before_s: float) -> float:
        """Deliver `message` later, and not before a given time. Returns when, if nothing is cut."""
        if self.is_cut(source, target):
            self._parked.setdefault((source, target), []).append(message)
            return not_before_s
        latency_s = WITHIN_S if source == target else self._latency_s()
        at_s = max(self.loop.time() + latency_s, not_before_s)
        self.loop.call_at(at_s, message)
        return at_s

    async def handle(self, process: SimulatedProcess) -> None:
        """Delay a message to this process by some rounds of its handlers. Check that it waits at most a few
        times as long as all handlers computed meanwhile."""
        since_s, before_s = self.loop.time(), process.handled_s
        for _ in range(self.handler_rounds):
            process.compute(ROUND_S)
            process.handled_s += ROUND_S
            await asyncio.sleep(0)
        waited_s, handled_s = self.loop.time() - since_s, process.handled_s - before_s
        if waited_s > HANDLERS_PART * handled_s + TURNS_S:
            text = (
                f"{process.name}: a message waited for {waited_s:.2f} s beside {handled_s:.2f} s of handlers"
            )
            self.trace.violate(self.loop.time(), "live-is-not-lost", text)

    def loses(self) -> bool:
        return self._draw(self.weather.lost_share, "request lost")

    def loses_answer(self) -> bool:
        return self._draw(self.weather.unanswered_share, "answer lost")

    def late_request_s(self, method: str) -> float:
        """Return the time before which a request does not arrive."""
        return self._late_s(method, LATE_REQUEST_S)

    def late_answer_s(self, method: str) -> float:
        """Return the time before which the answer to a request that arrived now does not arrive."""
        return self._late_s(method, LATE_ANSWER_S)

    def doubles(self, method: str) -> float | None:
        """Return after how many seconds the request arrives a second time, or None if it does not."""
        if method not in REPEATED or not self._draw(self.weather.twice_share, "request doubled"):
            return None
        return self._random.uniform(0.0, 1.0)

    def patience_s(self) -> float:
        """Seconds until a connection with a lost message counts as broken."""
        return self._random.choice((0.05, 0.5, 2.0, KEEPALIVE_S))

    def _draw(self, share: float, kind: str) -> bool:
        if share <= 0.0 or self._random.random() >= share:
            return False
        self.trace.fault(self.loop.time(), kind)
        return True

    def _late_s(self, method: str, most_s: float) -> float:
        if method != "Renew" or not self.weather.late_renewals:
            return 0.0
        self.trace.faults["late renewal"] += 1
        return self.loop.time() + self._random.uniform(0.0, most_s)

    def _latency_s(self) -> float:
        weather = self.weather
        if weather.slow_share and self._random.random() < weather.slow_share:
            self.trace.faults["slow message"] += 1
            return self._random.uniform(0.0, weather.slow_s)
        return weather.latency_s * (0.5 + self._random.random())

    def _break_if_cut(self, one: str, other: str) -> None:
        if self.is_cut(one, other) or self.is_cut(other, one):
            self.reset(one, other)

    def _break_if_paused(self, process: SimulatedProcess) -> None:
        if process.life is Life.PAUSED:
            for call in list(self._calls.values()):
                if call.caller is process or call.server_process is process:
                    call.break_off("keepalive watchdog timeout")


def unavailable(details: str) -> grpc.aio.AioRpcError:
    return rpc_error(grpc.StatusCode.UNAVAILABLE, details)


def rpc_error(
    code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)
