"""Reader of the pages of the stack's other bootstraps, so that an operator sees one stack.

All others are called at once, and answer from what they themselves have. A call ends after ANSWER_S. One that
did not answer in that time is not called for SILENT_MS, so that pages which are read again and again do not
wait for it each time. No request depends on what is read here.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from baton.ids import Opener
from baton.runtime.clock import Clock
from baton.runtime.logging import Log
from baton.wire.baton.v1 import bootstraps_pb2, bootstraps_pb2_grpc
from baton.wire.bootstrap_addresses import BootstrapAddresses
from baton.wire.channel import Channels
from baton.wire.service_role import ServiceRole

log = Log(__name__)

ANSWER_S: Final = 1.0
"""Longest wait for the pages of all other bootstraps, in seconds. It includes the look-up of their names."""
LOOK_UP_SHARE: Final = 0.25
"""Share of that wait in which names may be looked up. Later results count from the next page on."""
LOOK_UP_MS: Final = 5_000
"""Milliseconds between two look-ups of the names."""
SILENT_MS: Final = 5_000
"""Milliseconds for which a bootstrap that did not answer in time is not called."""
READS_MAX: Final = 16
"""Most pages for which other bootstraps are called at one time."""
REASON_CHARS_MAX: Final = 200
PAGE_BYTES_MAX: Final = 4 << 20
"""Longest page that one bootstrap sends another, in bytes."""


@dataclass(frozen=True, slots=True)
class PeerPages:
    """Pages of one kind of the other bootstraps."""

    pages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Page of each bootstrap that answered, by its address."""
    unanswered: Sequence[str] = ()
    """Sentences that say which bootstraps did not answer."""


@dataclass(frozen=True, slots=True)
class _Answer:
    opener: Opener
    page: Mapping[str, Any]


class PeerBootstraps:
    """The stack's other bootstraps, by their gRPC addresses. Used from one event loop."""

    def __init__(
        self,
        addresses: BootstrapAddresses,
        channels: Channels,
        opener: Opener,
        own_address: str,
        clock: Clock,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Make a reader that has called nothing yet.

        `addresses`: of all bootstraps. This one may be among them, and is recognised by its `opener`.
        `own_address`: gRPC address of this bootstrap on its own host. `answer_s`: see ANSWER_S.
        """
        self._addresses = addresses
        self._channels = channels
        self._opener = opener
        self._own_address = own_address
        self._clock = clock
        self._answer_s = answer_s
        self._listed: Sequence[str] = addresses.present
        self._looked_up_ms: int | None = None
        self._own: str | None = None
        """Address of this bootstrap among those of the stack. None if it is not known."""
        self._silent_until_ms: dict[str, int] = {}
        self._reads = 0

    @property
    def own_address(self) -> str:
        """Address by which the other bootstraps call this one, if it is known, else that on its own host."""
        return self._own or self._own_address

    async def read(self, request: bootstraps_pb2.GetPageRequest) -> PeerPages:
        """Return a page of each other bootstrap. It takes `answer_s` seconds at most, and raises nothing."""
        if not self._listed:
            return PeerPages()
        if self._reads == READS_MAX:
            return PeerPages({}, [f"The other bootstraps were not called: {READS_MAX} pages wait for them."])
        self._reads += 1
        try:
            return await self._read(request)
        finally:
            self._reads -= 1

    async def _read(self, request: bootstraps_pb2.GetPageRequest) -> PeerPages:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._answer_s
        await self._look_up()
        others = [each for each in self._listed if each != self._own]
        left_s = max(until_s - loop.time(), 0.0)
        answers = await asyncio.gather(*(self._call(each, request, left_s) for each in others))
        known = {self._opener}
        pages: dict[str, Mapping[str, Any]] = {}
        for address, answer in zip(others, answers, strict=True):
            if isinstance(answer, str):
                continue
            if answer.opener == self._opener:
                self._own = address
            elif answer.opener not in known:
                pages[address] = answer.page
            known.add(answer.opener)
        return PeerPages(pages, [each for each in answers if isinstance(each, str)])

    async def _look_up(self) -> None:
        """Look the names up again, if the last look-up is LOOK_UP_MS ago."""
        now_ms = self._clock.now_ms()
        if self._looked_up_ms is not None and now_ms - self._looked_up_ms < LOOK_UP_MS:
            return
        self._looked_up_ms = now_ms
        listed = await self._addresses.look_up(self._answer_s * LOOK_UP_SHARE)
        gone, self._listed = set(self._listed) - set(listed), listed
        for address in gone:
            self._channels.drop_address(address)
            self._silent_until_ms.pop(address, None)
        if self._own in gone:
            self._own = None

    async def _call(
        self, address: str, request: bootstraps_pb2.GetPageRequest, within_s: float
    ) -> _Answer | str:
        """Return what the bootstrap at `address` answers, or a sentence that says that it did not."""
        silent = f"Bootstrap {address} did not answer within {self._answer_s:g} s."
        if self._clock.now_ms() < self._silent_until_ms.get(address, 0):
            return silent
        channel = self._channels.to(address, ServiceRole.BOOTSTRAP)
        try:
            reply = await bootstraps_pb2_grpc.BootstrapServiceStub(channel).GetPage(request, timeout=within_s)
            page = json.loads(reply.json) if len(reply.json) <= PAGE_BYTES_MAX else None
        except grpc.aio.AioRpcError as error:
            text = str(error.details() or error.code().name)
            log.debug("a bootstrap did not answer", address=address, cause=text)
            match error.code():
                case grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._silent_until_ms[address] = self._clock.now_ms() + SILENT_MS
                    return silent
                case grpc.StatusCode.UNAVAILABLE:
                    return f"Bootstrap {address} did not answer: there is no connection to it."
            return f"Bootstrap {address} did not answer: {text[:REASON_CHARS_MAX]}."
        except (ValueError, RecursionError):
            return unreadable(address)
        if not isinstance(page, dict):
            return unreadable(address)
        return _Answer(Opener(reply.opener), page)


def unreadable(address: str) -> str:
    """Return the sentence that says that a bootstrap's page cannot be read."""
    return f"Bootstrap {address} answered in another form than this version reads."
