"""Simulated network in one process, which decides when the bytes of each put (one-sided write) land.

It has no clock and no thread. Time is a count of steps, one for each `poll` or `progress` of any endpoint.
Faults are drawn from the seed of the plan. Bytes move between real addresses of this process when they land,
not when they are posted. So a test sees it if a source changes too early, or if a target is reused too early,
as it would on a real network.
"""

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.ids import Incarnation
from baton.testing.transfer_faults import NO_FAULTS, FaultPlan
from baton.transfer.transfer_protocol import Endpoint, PutState, Region, Run, TransferError

UNDER_WAY_MAX: Final = 1 << 16
"""Most puts (one-sided writes) under way at once in a simulated network. Further puts are refused."""
NEVER: Final = 1 << 62
"""Step number that is never reached: nothing is due."""


@dataclass(slots=True)
class _Part:
    due: int
    """Step of the simulated network at which this byte range lands."""
    source: int | bytes
    """Address of the source bytes, or a copy of them if their process may have freed the memory."""
    target: int
    length: int


@dataclass(slots=True)
class Write:
    """One put (one-sided write) that is under way."""

    sender: Incarnation
    receiver: Incarnation
    parts: list[_Part]
    """Byte ranges of this one-sided write that have not landed yet."""
    fails_at: int | None
    """Step of the simulated network at which this write ends without reaching the peer. None if it does not
    fail."""
    state: PutState = PutState.PENDING
    due: int = 0
    """Next step of the simulated network at which a byte range of this write lands, or the write fails."""


@dataclass(slots=True)
class _Port:
    endpoint: Endpoint
    stalled: bool = False


class MemoryFabric:
    """Simulated network between the transfer endpoints of one process.

    The same plan and the same order of calls give the same result.
    """

    def __init__(self, plan: FaultPlan = NO_FAULTS) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed)  # noqa: S311 a schedule to be replayed, no secret
        self._step = 0
        self._ports: dict[Incarnation, _Port] = {}
        self._writes: list[Write] = []
        self._due_next = NEVER
        """Next step at which a part of any put lands, or a put fails."""
        self._closed: set[Incarnation] = set()
        """Incarnations of closed endpoints whose process still lives. Peers that know their addresses may
        still write there."""

    # ---- called by tests and simulations

    def stall(self, incarnation: Incarnation) -> None:
        """Simulate a stopped process. Until `resume` no byte lands in it or comes from it, and none is lost.

        Raises KeyError if it is not attached.
        """
        self._ports[incarnation].stalled = True

    def resume(self, incarnation: Incarnation) -> None:
        self._ports[incarnation].stalled = False

    def kill(self, incarnation: Incarnation) -> None:
        """Simulate the end of a process. No byte lands in it or comes from it any more, its closed endpoint
        included.

        Idempotent.
        """
        for write in self._writes:
            if incarnation in (write.sender, write.receiver):
                write.state = PutState.FAILED
        self._ports.pop(incarnation, None)
        self._closed.discard(incarnation)
        self._forget_ended()

    @property
    def puts_under_way(self) -> int:
        """Number of puts (one-sided writes) under way. At 0 no byte can land any more."""
        return len(self._writes)

    # ---- called by endpoints

    def attach(self, endpoint: Endpoint) -> None:
        """Attach an endpoint to the network. Raises TransferError if its incarnation is attached already."""
        if endpoint.incarnation in self._ports:
            raise TransferError(f"incarnation {endpoint.incarnation:#x} is attached already")
        self._ports[endpoint.incarnation] = _Port(endpoint)

    def detach(self, incarnation: Incarnation) -> None:
        """Detach a closed endpoint from the network. Its own pending puts still land, from copies of their
        sources.

        Puts to it do not land, except for the share of the plan (`blind_share`) that ignores endpoints.
        """
        for write in self._writes:
            if write.sender == incarnation:
                for part in write.parts:
                    if isinstance(part.source, int):
                        part.source = ctypes.string_at(part.source, part.length)
            if write.receiver == incarnation and not self._draw(self._plan.blind_share):
                write.state = PutState.FAILED
        if self._ports.pop(incarnation, None) is not None:
            self._closed.add(incarnation)
        self._forget_ended()

    def reaches(self, endpoint: Endpoint) -> bool:
        port = self._ports.get(endpoint.incarnation)
        return port is not None and port.endpoint == endpoint

    def post(
        self,
        sender: Incarnation,
        receiver: Incarnation,
        source: Region,
        target: Region,
        runs: Sequence[Run],
    ) -> Write:
        """Post a put (one-sided write) to the network. Raises TransferError if too many are under way."""
        if len(self._writes) >= UNDER_WAY_MAX:
            raise TransferError(f"{UNDER_WAY_MAX} puts are under way")
        held = self._draw(self._plan.hold_share)
        fails = self._draw(self._plan.fail_share)
        late = self._plan.hold_steps if held else 0
        parts = [
            _Part(self._due() + late, source.address + at, target.address + to, length)
            for at, to, length in runs
        ]
        fails_at = self._random.choice(parts).due if fails else None
        write = Write(sender, receiver, parts, fails_at)
        write.due = due_next(write)
        if receiver in self._ports or (receiver in self._closed and self._draw(self._plan.blind_share)):
            self._writes.append(write)
            self._due_next = min(self._due_next, write.due)
        else:
            write.state = PutState.FAILED
        return write

    def step(self) -> None:
        """Advance the time by one step: all byte ranges that are due land."""
        self._step += 1
        if self._step < self._due_next:
            return
        stalled = {incarnation for incarnation, port in self._ports.items() if port.stalled}
        for write in self._writes:
            if write.due <= self._step and write.receiver not in stalled and write.sender not in stalled:
                self.land(write)
        self._forget_ended()

    def land(self, write: Write) -> None:
        """Land the byte ranges of a put that are due, or fail the put if that is due."""
        if write.fails_at is not None and write.fails_at <= self._step:
            write.state = PutState.FAILED
            return
        for part in write.parts:
            if part.due <= self._step:
                ctypes.memmove(part.target, part.source, part.length)
        write.parts = [part for part in write.parts if part.due > self._step]
        if not write.parts:
            write.state = PutState.DONE
            return
        write.due = due_next(write)

    def _due(self) -> int:
        return self._step + 1 + self._random.randint(0, self._plan.delay_steps_max)

    def _forget_ended(self) -> None:
        self._writes = [write for write in self._writes if write.state is PutState.PENDING]
        self._due_next = min((write.due for write in self._writes), default=NEVER)

    def _draw(self, share: float) -> bool:
        return self._random.random() < share


def due_next(write: Write) -> int:
    """Return the next step at which a byte range of the put (one-sided write) lands, or the put fails."""
    due = min(part.due for part in write.parts)
    return due if write.fails_at is None else min(due, write.fails_at)
