"""In-process network: when the bytes of each put land, and which of them never do.

It has no clock and no thread. Time is a count of steps, one for each `poll` or `progress` of any endpoint.
Faults are drawn from the seed of the plan. Bytes move between real addresses of this process when they
land, not when they are posted. So a source that changes too early, or a target that is reused too early,
shows as on a real network.
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
"""Most puts under way in a fabric. Further puts are refused."""
NEVER: Final = 1 << 62
"""Number that no step has."""


@dataclass(slots=True)
class _Part:
    due: int
    """Step at which it lands."""
    source: int | bytes
    """Address of the source, or its bytes if their process may have freed the memory."""
    target: int
    length: int


@dataclass(slots=True)
class Write:
    """A put under way."""

    sender: Incarnation
    receiver: Incarnation
    parts: list[_Part]
    """Parts that have not landed yet."""
    fails_at: int | None
    """Step at which it ends without reaching the peer."""
    state: PutState = PutState.PENDING
    due: int = 0
    """First step at which something happens to it."""


@dataclass(slots=True)
class _Port:
    endpoint: Endpoint
    stalled: bool = False


class MemoryFabric:
    """Network between the endpoints of one process. Deterministic for a plan and an order of calls."""

    def __init__(self, plan: FaultPlan = NO_FAULTS) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed)  # noqa: S311 a schedule to be replayed, no secret
        self._step = 0
        self._ports: dict[Incarnation, _Port] = {}
        self._writes: list[Write] = []
        self._due_next = NEVER
        """First step at which something happens to any put."""
        self._closed: set[Incarnation] = set()
        """Closed endpoints whose process lives, so that peers that know its addresses may still write to
        them."""

    # ---- what tests and simulations do to it

    def stall(self, incarnation: Incarnation) -> None:
        """Stop a process: until `resume`, nothing lands in it or comes from it, and nothing is lost.

        Raises KeyError if it is not attached.
        """
        self._ports[incarnation].stalled = True

    def resume(self, incarnation: Incarnation) -> None:
        self._ports[incarnation].stalled = False

    def kill(self, incarnation: Incarnation) -> None:
        """End a process: nothing lands in it or comes from it any more, its closed endpoint included.
        Idempotent."""
        for write in self._writes:
            if incarnation in (write.sender, write.receiver):
                write.state = PutState.FAILED
        self._ports.pop(incarnation, None)
        self._closed.discard(incarnation)
        self._forget_ended()

    @property
    def puts_under_way(self) -> int:
        """Return the number of puts under way. 0: no byte can land any more."""
        return len(self._writes)

    # ---- what endpoints do

    def attach(self, endpoint: Endpoint) -> None:
        """Attach an endpoint. Raises TransferError if its incarnation is attached already."""
        if endpoint.incarnation in self._ports:
            raise TransferError(f"incarnation {endpoint.incarnation:#x} is attached already")
        self._ports[endpoint.incarnation] = _Port(endpoint)

    def detach(self, incarnation: Incarnation) -> None:
        """Close an endpoint. Its own puts still land, from copies.

        Puts toward it do not land, except for the plan's share that ignores endpoints.
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
        """Post a put. Raises TransferError if too many are under way."""
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
        """Take one step: all parts that are due land."""
        self._step += 1
        if self._step < self._due_next:
            return
        stalled = {incarnation for incarnation, port in self._ports.items() if port.stalled}
        for write in self._writes:
            if write.due <= self._step and write.receiver not in stalled and write.sender not in stalled:
                self._land(write)
        self._forget_ended()

    def _land(self, write: Write) -> None:
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
    """Return the first step at which something happens to a put."""
    due = min(part.due for part in write.parts)
    return due if write.fails_at is None else min(due, write.fails_at)
