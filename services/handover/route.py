"""Route from one prefill rank to the memory that a decode worker exposes to it."""

from dataclasses import dataclass

from baton.ids import Incarnation
from baton.pages.layout import GroupHead
from baton.pages.transfer_plan import TransferPlan


@dataclass(frozen=True, slots=True)
class Target:
    """Rank of a decode worker that this prefill rank writes to."""

    peer: Incarnation
    """Id of the transfer endpoint of that rank."""
    plan: TransferPlan
    """Plan of which page bytes go where. Empty if only the metadata record is written to that rank."""
    heads: tuple[GroupHead, ...]
    """KV heads that this rank of the receiver holds."""


@dataclass(frozen=True, slots=True)
class Route:
    exposure: Incarnation
    """Id under which the receiver's rank 0 exposes its memory now. Grants name it. It is the same on every
    rank of the sender."""
    page_tokens: tuple[int, ...]
    """Tokens per page of the receiver, by KV group."""
    targets: tuple[Target, ...]
    """Ranks of the receiver to write to. For the elected rank, which writes records and seals, they are all
    ranks, in order."""
    endpoints: frozenset[Incarnation] = frozenset()
    """Ids of the transfer endpoints of all ranks of the receiver. Every rank of the sender knows them, so
    that all answer alike."""

    def revoked_by(self, exposure: Incarnation) -> bool:
        """Return whether the receiver moved this memory away before it made `exposure`, which then has a
        larger id.

        A connect message may arrive late. So a different id alone does not show which exposure is newer.
        """
        return self.exposure < exposure
