"""Route from one rank of a sender to one exposure of a receiver's memory."""

from dataclasses import dataclass

from baton.ids import Incarnation
from baton.pages.layout import GroupHead
from baton.pages.transfer_plan import TransferPlan


@dataclass(frozen=True, slots=True)
class Target:
    """One rank of the receiver that this rank writes to."""

    peer: Incarnation
    """Id of its transfer endpoint."""
    plan: TransferPlan
    """Plan of which page bytes go where. Empty if only the record is written there."""
    heads: tuple[GroupHead, ...]
    """KV heads of this rank of the receiver."""


@dataclass(frozen=True, slots=True)
class Route:
    exposure: Incarnation
    """Exposure id of the receiver's rank 0. Grants name it, and it is the same on every rank."""
    page_tokens: tuple[int, ...]
    """Tokens per page of the receiver, by KV group."""
    targets: tuple[Target, ...]
    """Ranks to write to. For the elected rank these are all ranks of the receiver, in order."""
    endpoints: frozenset[Incarnation] = frozenset()
    """Endpoint ids of all ranks of the receiver, so that all ranks of this worker answer alike."""

    def revoked_by(self, exposure: Incarnation) -> bool:
        """Return whether this memory was moved before its receiver made `exposure`, which then has a larger
        id.

        A Connect may arrive late. So a different id alone does not show which exposure is newer.
        """
        return self.exposure < exposure
