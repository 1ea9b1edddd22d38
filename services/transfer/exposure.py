"""What do peers know of this process's memory, and how is it taken away from them?

An exposure is one exposing of the memory: a transfer endpoint under an id of its own, with every memory
registered. To the peers, each exposure is a peer of its own. Revoking it is the one proof against a sender
that neither answers nor dies: its endpoint is gone, so that what travels by a connection or a registration
has nowhere to land, and the memory lies elsewhere, so that what travels by address lands where nobody reads.
Ids grow from one exposure of a process to the next: a peer that hears of two knows which one is no more, in
whichever order it hears of them.
"""

from collections.abc import Callable, Mapping
from typing import Final

from baton.ids import Incarnation
from baton.runtime.host_memory import Movable
from baton.transfer.transfer_protocol import Endpoint, Region, Transfer


class Exposure:
    """The present exposure of `memories`, region name to memory."""

    def __init__(
        self,
        make: Callable[[Incarnation], Transfer],
        new_id: Callable[[], Incarnation],
        memories: Mapping[str, Movable],
    ) -> None:
        """`new_id`: a fresh one each time; one that is not larger than the last gives way to the next number.
        Raises TransferError."""
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
        """The present endpoint. After `revoke` it is another; after `close`, a closed one."""
        return self._transfer

    def endpoint(self) -> Endpoint:
        """What peers need in order to write. Raises TransferError when closed."""
        return self._transfer.endpoint()

    def revoke(self) -> None:
        """Take the memory away from everyone who knows it. Its contents stay, at other addresses.

        What was written before is there; nothing that lands later changes anything. While nobody reads or
        writes the memory; views and tensors of it have to be taken anew. Own puts that are pending are not
        seen to end. Raises CannotMove or TransferError, and is then closed: nothing is exposed at all, but
        some memory may not have moved, and late writes may reach it. The process has to end.
        """
        # First the endpoint: a network card knows pages by registration, and would follow them.
        self._transfer.close()
        for memory in self._memories.values():
            memory.move()
        self._expose()

    def close(self) -> None:
        """Idempotent."""
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
