"""Route from one prefill rank to the memory that a decode worker exposes to it."""

from dataclasses import dataclass

from baton.ids import Incarnation
from baton.pages.layout import GroupHead
from baton.pages.transfer_plan import TransferPlan


@dataclass(frozen=True, slots=True)
class Target:
    """One rank of a decode worker, as the destination of this prefill rank's writes."""

    peer: Incarnation
    """Id of the transfer endpoint of that rank."""
    plan: TransferPlan
    """Plan of which bytes of this rank's pages go where in that rank's pages. Empty if this rank writes no
    pages there."""
    heads: tuple[GroupHead, ...]
    """KV heads that this rank of the receiver holds."""


@dataclass(frozen=True, slots=True)
class Route:
    exposure: Incarnation
    """Id under which rank 0 of the receiver exposes its memory now. Grants carry this id. All ranks of the
    sender have the same value."""
    page_tokens: tuple[int, ...]
    """Tokens per page of the receiver, by KV group."""
    targets: tuple[Target, ...]
    """Ranks of the receiver that this rank writes to. The elected rank writes records and seals, so it has
    all ranks of the receiver, in rank order."""
    endpoints: frozenset[Incarnation] = frozenset()
    """Ids of the transfer endpoints of all ranks of the receiver. All ranks of the sender have them, so that
    all give the same answer to a connect."""

    def revoked_by(self, exposure: Incarnation) -> bool:
        """Return whether the receiver moved this memory away before it made `exposure`, which then has a
        larger id.

        A connect message may arrive late. So a different id alone does not show which exposure is newer.
        """
        return self.exposure < exposure
