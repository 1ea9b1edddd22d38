"""Exposure of this process's memory to peers that write into it, and the revocation of that exposure.

An exposure is a transfer endpoint with its own id, at which all of the memory is registered. Peers treat each
exposure as a separate peer.

A sender that neither answers nor dies might still write. Only a revocation proves that it no longer can. It
closes the endpoint, so writes over a connection or a registration find no target. It also moves the memory,
so writes to the old addresses reach memory that is not read.

Ids grow from one exposure of a process to the next. So a peer that learns of two exposures knows which one is
the later, in any order of arrival.
"""

from collections.abc import Callable, Mapping
from typing import Final

from baton.ids import Incarnation
from baton.runtime.host_memory import Movable
from baton.transfer.transfer_protocol import Endpoint, Region, Transfer


class Exposure:
    """Registration of this process's memory at a transfer endpoint, so that peers can write to it until
    `revoke`.

    `memories`: memory by region name.
    """

    def __init__(
        self,
        make: Callable[[Incarnation], Transfer],
        new_id: Callable[[], Incarnation],
        memories: Mapping[str, Movable],
    ) -> None:
        """Register all memory at a new transfer endpoint. Raises TransferError.

        `make`: makes an endpoint of the backend. `new_id`: returns a fresh id for an exposure. An id that is
        not larger than the last one is replaced by the next number.
        """
        self._make: Final = make
        self._new_id: Final = new_id
        self._memories: Final = dict(memories)
        self._id = Incarnation(0)
        self._expose()

    @property
    def id(self) -> Incarnation:
        return self._id

    @property
    def transfer(self) -> Transfer:
        """Transfer endpoint of the current exposure. `revoke` replaces it. After `close` it is a closed
        endpoint."""
        return self._transfer

    def endpoint(self) -> Endpoint:
        """Return the data that peers need in order to write into this memory. Raises TransferError when
        closed."""
        return self._transfer.endpoint()

    def revoke(self) -> None:
        """Move the memory to new addresses, out of reach of all peers that know the old ones.

        The contents move along. Data that landed before is kept, and data that lands later changes nothing.
        Nothing may read or write the memory during the call. Views and tensors of it are invalid afterwards.
        How this process's own pending puts end stays unknown.

        Raises CannotMove or TransferError, and is then closed. Nothing is exposed in that case, but some
        memory may not have moved, and late writes may reach it. The process has to end.
        """
        # The endpoint is closed first: a network card that has the pages registered would follow them.
        self._transfer.close()
        for memory in self._memories.values():
            memory.move()
        self._expose()

    def close(self) -> None:
        """Close the transfer endpoint. Idempotent."""
        self._transfer.close()

    def _expose(self) -> None:
        self._id = Incarnation(max(self._new_id(), self._id + 1))
        self._transfer = self._make(self._id)
        try:
            for name, memory in self._memories.items():
                self._transfer.register(Region(name, memory.address, memory.length, memory.device))
            self._transfer.endpoint()
        except Exception:
            self._transfer.close()
            raise
