"""How does a sender's rank reach one exposure of a receiver's memory?"""

from dataclasses import dataclass

from baton.ids import Incarnation
from baton.pages.layout import GroupHead
from baton.pages.transfer_plan import TransferPlan


@dataclass(frozen=True, slots=True)
class Target:
    """One rank of the receiver that this rank writes to."""

    peer: Incarnation
    """Of its endpoint."""
    plan: TransferPlan
    """Of the pages; an empty one where only the record is written."""
    heads: tuple[GroupHead, ...]
    """That it holds."""


@dataclass(frozen=True, slots=True)
class Route:
    exposure: Incarnation
    """Of the receiver's rank 0: what grants name, the same on every rank."""
    page_tokens: tuple[int, ...]
    """Of the receiver's pages of each group."""
    targets: tuple[Target, ...]
    """For the elected rank every rank of the receiver, in their order; for the others those that they have
    pages for."""
    endpoints: frozenset[Incarnation] = frozenset()
    """Of every rank of the receiver, so that all ranks answer alike to what is said of them."""

    def revoked_by(self, exposure: Incarnation) -> bool:
        """Whether this memory was taken back before its receiver made `exposure`, whose id is larger then. A
        Connect may come late: that it names another exposure does not say which is the newer one."""
        return self.exposure < exposure
