"""When is exposed memory taken back from its senders, and how?

The last resort against a sender that neither answers nor dies, and for one that never sees the end of what it
wrote. The leader asks for it when a proof is overdue (`services.rooms.quarantine`) or a sender is shut out
(`services.decode.peers`), its command reaches every rank, and it is done in the first turn in which every
rank's engine is free: all of the memory moves.
"""

from collections.abc import Iterable

from services.decode.metrics import DecodeMetrics
from services.decode.peers import Peers
from services.pages.holdings import Holdings
from services.rooms.errors import Cause, Reason
from services.rooms.evidence import Failed, Fenced, Proof
from services.rooms.phases import Phase
from services.rooms.quarantine import in_quarantine, revocation_due
from services.rooms.receiver import Receiver
from services.runtime.errors import MemoryKept
from services.runtime.host_memory import CannotMove, HostMemory
from services.runtime.logging import Log
from services.transfer.exposure import Exposure
from services.transfer.interface import TransferError

log = Log(__name__)


class Revocation:
    def __init__(
        self,
        exposure: Exposure,
        holdings: Holdings,
        slots: HostMemory,
        peers: Peers,
        metrics: DecodeMetrics,
    ) -> None:
        self._exposure = exposure
        self._holdings = holdings
        self._slots = slots
        self._peers = peers
        self._metrics = metrics
        self._asked = False
        """The leader's: its command is on the way, or being carried out."""
        self.agreed = False
        """And to be done as soon as it can be."""

    def due(self, rooms: Iterable[Receiver], now_ms: int) -> bool:
        """Whether the leader is to ask for it now; said once."""
        if self._asked:
            return False
        self._asked = self._peers.shut_out or revocation_due(rooms, now_ms, len(self._holdings.pages))
        return self._asked

    def agree(self, rooms: Iterable[Receiver]) -> None:
        """Every room whose memory is exposed ends: all of it is about to go."""
        self.agreed = True
        cause = Cause(Reason.MEMORY_REVOKED, "decode: its memory was taken back from another sender")
        for room in rooms:
            if room.phase is Phase.TRANSFERRING:
                room.note(Failed(cause))

    def carry_out(self, rooms: Iterable[Receiver]) -> None:
        """Proof for every room in quarantine: what their senders know of leads nowhere. Admitted rooms keep
        their pages, at another address. Raises MemoryKept: this worker has to end."""
        try:
            self._exposure.revoke()
        except (CannotMove, TransferError) as error:
            raise MemoryKept(f"exposed memory cannot be taken back from senders: {error}") from error
        self._holdings.slots.moved(self._slots.view)
        for room in rooms:
            if in_quarantine(room):
                room.note(Fenced(Proof.REVOKED))
        self.agreed = self._asked = False
        self._metrics.revoked()
        log.warning("exposed memory taken back", exposure=self._exposure.id)
