"""Exposure of this process's memory to peers, and its revocation.

An exposure is a transfer endpoint with its own id and all memory registered. Peers treat each exposure as a
peer of its own. Its revocation is the only proof against a sender that neither answers nor dies. The
endpoint is closed, so that writes over a connection or a registration find no target. The memory is moved,
so that writes by address reach memory that is not read. Ids grow from one exposure of a process to the
next. So a peer that learns of two knows which one is the later, in any order of arrival.
"""

from collections.abc import Callable, Mapping
from typing import Final

from baton.ids import Incarnation
from baton.runtime.host_memory import Movable
from baton.transfer.transfer_protocol import Endpoint, Region, Transfer


class Exposure:
    """Present exposure of `memories`, a mapping from region name to memory."""

    def __init__(
        self,
        make: Callable[[Incarnation], Transfer],
        new_id: Callable[[], Incarnation],
        memories: Mapping[str, Movable],
    ) -> None:
        """Expose the memory. `make`: makes an endpoint of the backend. `new_id`: returns a fresh id. An id
        that is not larger than the last is replaced by the next number. Raises TransferError."""
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
        """Present transfer endpoint. `revoke` replaces it. After `close` it is a closed one."""
        return self._transfer

    def endpoint(self) -> Endpoint:
        """Return the data that peers need in order to write. Raises TransferError when closed."""
        return self._transfer.endpoint()

    def revoke(self) -> None:
        """Move the memory out of reach of all peers that know it. Its contents stay, at other addresses.

        Data that landed before is kept. Data that lands later changes nothing. Nothing may read or write
        the memory during the call, and views and tensors of it are invalid afterwards. The ends of own
        pending puts remain unknown.

        Raises CannotMove or TransferError, and is then closed. Nothing is exposed in that case, but some
        memory may not have moved, and late writes may reach it. The process has to end.
        """
        # The endpoint first: a network card knows pages by registration, and would follow moved ones.
        self._transfer.close()
        for memory in self._memories.values():
            memory.move()
        self._expose()

    def close(self) -> None:
        """Close the endpoint. Idempotent."""
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
