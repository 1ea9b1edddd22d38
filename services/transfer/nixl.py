"""Transfer backend between processes: one-sided writes (puts) over NIXL with UCX.

What was measured with nixl 1.5.1, and what follows from it:

* Its progress thread spins one core per agent, so it is off. `poll` and `progress` drive progress. Each call
  takes 3-5 µs when nothing happens.
* On one host, bytes move by cross-memory attach. Posting a put copies the bytes and returns when the copy is
  done (0.4 ms for 4 MiB; the GIL is released meanwhile). Over TCP posting returns at once, and the write
  lands only while the *target* makes progress.
* Neither releasing a handle nor removing the remote agent stops a write: bytes landed after both. After a
  removal the handle can no longer be polled. So a handle is kept until the library says that its write has
  ended. The remote agent is removed only when no write to it is left.
* Over TCP the target's `close` stops every write, because it closes the connection. With cross-memory attach
  it stops nothing. A sender that has not noticed the end of the connection still copies to the addresses that
  it knows, and gets DONE. So memory is taken away by closing *and* moving it (`exposure.py`), which takes 25
  ms.
* A peer that died shows as REMOTE_DISCONNECT, when polling and when posting.
* `add_remote_agent` takes 10-25 ms, which is part of `connect`. The first put takes 10-45 ms more, less if
  the target polls more often. Nothing else needs warming up. A caller to which this matters puts a few bytes
  first.
* Loading damaged metadata fails, but makes its agent name unusable for the life of the process. So metadata
  travels with a digest, which is checked before the library sees the metadata. The default agent name is
  drawn from the incarnation, which is never used again.
* The digest finds damage, not malice. Forged metadata with a valid digest can end the process inside the
  library. Only trusted peers may reach the port at which they are connected.

The bytes of `get_agent_metadata` are written and read by the library's own serialiser in C++, with explicit
tags and lengths, without pickle. `get_serialized_descs` and `deserialize_descs` do pickle, and are never
called. Descriptors are built here, from the plain integers of `Endpoint.regions`.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from baton.ids import Incarnation
from baton.runtime.logging import Log
from baton.transfer.bounds import (
    REGIONS_MAX,
    check_endpoint,
    check_region,
    check_runs,
    device_index,
    region_named,
)
from baton.transfer.ledger import Ledger
from baton.transfer.nixl_library import Library, framed, unframed
from baton.transfer.transfer_protocol import Endpoint, PutId, PutState, Region, Run, TransferError

log = Log(__name__)

CLOSING_ROUNDS: Final = 64
"""Rounds of progress made before the NIXL agent is closed, so that its connections can end.

UCX aborts the process if its worker ends while something is queued to a peer that died. One round was enough
in tests.
"""


@dataclass(slots=True)
class _Write:
    handle: Any
    fate: PutState | None = None
    """State in which this write ended, if that is known without polling the library, else None.

    PENDING: it failed with an error that does not prove its end, so the ledger decides its state.
    """


class NixlTransfer:
    """Transfer endpoint of one process over NIXL (`baton.transfer.transfer_protocol.Transfer`).

    Raises TransferError if nixl or its UCX backend does not load. Close it before the process ends: see
    CLOSING_ROUNDS.
    """

    def __init__(self, incarnation: Incarnation, agent_name: str | None = None) -> None:
        self._nixl = Library()
        self._name = agent_name or f"baton-{incarnation:016x}"
        self.ledger: Ledger[_Write] = Ledger(incarnation, self._name, self._forget)
        self._regions: dict[str, Region] = {}
        self._registrations: list[Any] = []
        self._endpoint: Endpoint | None = None
        self._agent: Any = self._nixl.new_agent(self._name)

    def register(self, region: Region) -> None:
        agent = self._open_agent()
        check_region(region)
        if region.name in self._regions:
            raise TransferError(f"region {region.name!r} is registered already")
        if self._endpoint is not None:
            raise TransferError(f"region {region.name!r} comes after the first endpoint()")
        kind, device = nixl_memory(region.device)
        with self._nixl.as_transfer_error(f"region {region.name!r} cannot be registered"):
            registration = agent.register_memory([(region.address, region.length, device, "")], mem_type=kind)
        self._registrations.append(registration)
        self._regions[region.name] = region

    def endpoint(self) -> Endpoint:
        agent = self._open_agent()
        if self._endpoint is None:
            with self._nixl.as_transfer_error("the agent's metadata cannot be read"):
                metadata = agent.get_agent_metadata()
            regions = tuple(self._regions.values())
            self._endpoint = Endpoint(self.ledger.incarnation, self._name, framed(metadata), regions)
        return self._endpoint

    def connect(self, peer: Endpoint) -> None:
        agent = self._open_agent()
        check_endpoint(peer)
        metadata = unframed(peer)
        if not self.ledger.lacks(peer):
            return
        with self._nixl.as_transfer_error(f"endpoint {peer.agent} cannot be connected"):
            name = agent.add_remote_agent(metadata).decode(errors="replace")
        if name != peer.agent:
            self._remove(name)
            raise TransferError(f"endpoint {peer.agent}: its metadata names another agent")
        try:
            agent.make_connection(name)
        except self._nixl.errors as error:
            self._remove(name)
            raise TransferError(f"endpoint {name} cannot be reached: {error}") from error
        self.ledger.add(peer)

    def connected(self, peer: Incarnation) -> bool:
        return self.ledger.usable(peer)

    def put(self, peer: Incarnation, region: str, runs: Sequence[Run]) -> PutId:
        agent = self._open_agent()
        link = self.ledger.link(peer)
        name = link.endpoint.agent
        source = region_named(region, self._regions, "this process")
        target = region_named(region, link.regions, f"peer {name}")
        check_runs(runs, source, target)
        if link.broken:
            raise TransferError(f"the connection to {name} broke")
        source_kind, source_device = nixl_memory(source.device)
        target_kind, target_device = nixl_memory(target.device)
        source_start, target_start = source.address, target.address
        sources = [(source_start + at, length, source_device) for at, _, length in runs]
        targets = [(target_start + to, length, target_device) for _, to, length in runs]
        try:
            local = agent.get_xfer_descs(sources, mem_type=source_kind)
            remote = agent.get_xfer_descs(targets, mem_type=target_kind)
            write = _Write(agent.initialize_xfer("WRITE", local, remote, name))
        except self._nixl.errors as error:
            raise TransferError(f"a put to {name} cannot be prepared: {error}") from error
        self._post(agent, peer, write)
        return self.ledger.post(peer, write)

    def _post(self, agent: Any, peer: Incarnation, write: _Write) -> None:
        """Post a prepared write. Raises TransferError if the library refused it before it began.

        After any other error the write counts as under way.
        """
        try:
            status = agent.transfer(write.handle)
        except self._nixl.refusals as error:
            self._release(write)
            raise TransferError(f"a put cannot be posted: {error}") from error
        except self._nixl.ends:
            self.ledger.broke(peer)
            write.fate = PutState.FAILED
        except self._nixl.errors as error:
            self._unproven(peer, write, error)
        else:
            write.fate = PutState.DONE if status == "DONE" else None

    def poll(self, put: PutId) -> PutState:
        ended = self.ledger.note_end(put)
        if ended is not None:
            return ended
        state = self._state(put, self.ledger.write(put))
        if state is not PutState.PENDING:
            self._release(self.ledger.end(put))
        return state

    def _state(self, put: PutId, write: _Write) -> PutState:
        if write.fate is None and self._agent is not None:
            self._check(self._agent, put.peer, write)
        if write.fate is PutState.PENDING:
            return self.ledger.unproven(put.peer)
        return write.fate or PutState.PENDING

    def _check(self, agent: Any, peer: Incarnation, write: _Write) -> None:
        try:
            status = agent.check_xfer_state(write.handle)
        except self._nixl.ends:
            self.ledger.broke(peer)
            write.fate = PutState.FAILED
        except self._nixl.errors as error:
            self._unproven(peer, write, error)
        else:
            write.fate = PutState.DONE if status == "DONE" else None

    def _unproven(self, peer: Incarnation, write: _Write, error: Exception) -> None:
        write.fate = PutState.PENDING
        self.ledger.broke(peer)
        if self.ledger.unproven(peer) is PutState.PENDING:
            log.error("a write went wrong in a way that does not prove its end", peer=peer, cause=str(error))

    def pending(self, peer: Incarnation) -> int:
        return self.ledger.pending(peer)

    def progress(self) -> None:
        agent = self._open_agent()
        # Baton sends no notices. Notices of others, whose names may not even be UTF-8, are dropped.
        with self._nixl.as_transfer_error("the agent makes no progress"), suppress(UnicodeDecodeError):
            agent.get_new_notifs()
        for put, write in self.ledger.abandoned():
            state = self._state(put, write)
            if state is not PutState.PENDING:
                self._release(self.ledger.end_abandoned(put, state))

    def disconnect(self, peer: Incarnation, *, gone: bool = False) -> None:
        self.ledger.leave(peer, gone=gone)

    def close(self) -> None:
        if self._agent is None:
            return
        for write in self.ledger.under_way():
            self._release(write)
        for peer in self.ledger.known():
            self._remove(peer.agent)
        with suppress(*self._nixl.errors, UnicodeDecodeError):
            for _ in range(CLOSING_ROUNDS):
                self._agent.get_new_notifs()
        for registration in self._registrations:
            with suppress(*self._nixl.errors):
                self._agent.deregister_memory(registration)
        self._registrations.clear()
        self._agent = None
        self.ledger.leave_all()

    def _open_agent(self) -> Any:
        if self._agent is None:
            raise TransferError("this endpoint is closed")
        return self._agent

    def _forget(self, peer: Endpoint) -> None:
        self._remove(peer.agent)

    def _remove(self, name: str) -> None:
        if self._agent is not None:
            with suppress(*self._nixl.errors):
                self._agent.remove_remote_agent(name)

    def _release(self, write: _Write) -> None:
        handle, write.handle = write.handle, None
        if handle is not None:
            with suppress(*self._nixl.errors):
                handle.release()


@lru_cache(maxsize=2 * REGIONS_MAX)
def nixl_memory(device: str) -> tuple[str, int]:
    """Return NIXL's memory type ("DRAM" or "VRAM") and device number for `device` ("cpu" or "cuda:N")."""
    index = device_index(device)
    return ("DRAM", 0) if index is None else ("VRAM", index)
