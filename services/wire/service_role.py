"""Roles of processes that talk over gRPC, with their names in certificates."""

from enum import StrEnum

from baton.rooms.phases import Side


class ServiceRole(StrEnum):
    """A process of one of the three services."""

    BOOTSTRAP = "bootstrap"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def tls_name(self) -> str:
        """The DNS name that its certificate has to hold. Nothing resolves it: pods come and go with addresses
        that no certificate can know."""
        return f"{self.value}.baton.internal"

    @staticmethod
    def of(side: Side) -> "ServiceRole":
        return ServiceRole(side.value)
