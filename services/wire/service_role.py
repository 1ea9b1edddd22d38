"""Roles of the processes that connect over gRPC, with their names in certificates."""

from enum import StrEnum

from baton.rooms.phases import Side


class ServiceRole(StrEnum):
    """Role of a process: bootstrap, prefill or decode."""

    BOOTSTRAP = "bootstrap"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def tls_name(self) -> str:
        """DNS name that a certificate of this role has to contain.

        Nothing resolves it. Pods come and go with addresses that no certificate can know.
        """
        return f"{self.value}.baton.internal"

    @staticmethod
    def of(side: Side) -> "ServiceRole":
        return ServiceRole(side.value)
