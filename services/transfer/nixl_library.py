"""Import of the nixl library without its console output, its error classes, and a digest for its metadata.

This is the only module that imports nixl. Functions of nixl that unpickle are never called with bytes of a
peer (`no-pickle`).
"""

import hashlib
import logging
import os
from typing import Any, Final

from baton.runtime.errors import StartupError
from baton.transfer.transfer_protocol import Endpoint, TransferError

BACKEND: Final = "UCX"
MAGIC: Final = b"baton-nixl-1\0"
DIGEST_BYTES: Final = 16
LIBRARY_VARIABLES: Final = ("UCX_", "NIXL_")
OURS: Final = ("UCX_LOG_LEVEL", "NIXL_LOG_LEVEL")
"""Environment variables that Baton sets itself. They only silence logs, so error texts leave them out."""


class Library:
    """The nixl library, imported when this is made (about 2 s) and without the lines that it prints at
    import."""

    def __init__(self) -> None:
        # Errors arrive as exceptions. The death of a peer needs no line on stderr.
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        raise_exceptions = logging.raiseExceptions
        try:
            from nixl import _api, _bindings
        except ImportError as error:
            raise TransferError(f"nixl cannot be loaded: {error}") from error
        finally:
            logging.raiseExceptions = raise_exceptions  # nixl's own logging set-up turns it off
        self._api = _api
        self.ends = (_bindings.nixlRemoteDisconnectError, _bindings.nixlCancelledError)
        """Classes of nixl's errors that prove that a write has ended, because its connection has ended."""
        self.refusals = (
            _bindings.nixlInvalidParamError,
            _bindings.nixlMismatchError,
            _bindings.nixlNotAllowedError,
            _bindings.nixlNotFoundError,
            _bindings.nixlNotSupportedError,
        )
        """Classes of nixl's errors that are raised before a write is posted."""
        rest = (
            _bindings.nixlBackendError,
            _bindings.nixlNotPostedError,
            _bindings.nixlRepostActiveError,
            _bindings.nixlUnknownError,
        )
        self.errors: tuple[type[Exception], ...] = (*self.ends, *self.refusals, *rest)

    def new_agent(self, name: str) -> Any:
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        with self.as_transfer_error("no NIXL agent can be made", describe_settings()):
            agent = self._api.nixl_agent(name, config)
        if BACKEND not in agent.backends:
            raise TransferError(f"NIXL has no {BACKEND} backend on this machine{describe_settings()}")
        return agent

    def as_transfer_error(self, what: str, besides: str = "") -> "AsTransferError":
        return AsTransferError(self.errors, what, besides)


def describe_settings() -> str:
    """Return the UCX_ and NIXL_ environment variables with their values, as a text to append to an error."""
    given = {name: value for name, value in os.environ.items() if name.startswith(LIBRARY_VARIABLES)}
    listed = " ".join(f"{name}={value}" for name, value in sorted(given.items()) if name not in OURS)
    return f"; the environment sets {listed}" if listed else ""


class AsTransferError:
    """Context manager that turns any error of nixl into a TransferError that names the failed call.

    nixl's errors share no base class.
    """

    def __init__(self, errors: tuple[type[Exception], ...], what: str, besides: str = "") -> None:
        self._errors = errors
        self._what = what
        self._besides = besides

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._errors):
            raise TransferError(f"{self._what}: {error}{self._besides}") from error


def install_memory_hooks() -> None:
    """Make and drop the first NIXL agent of the process, so that UCX installs its memory hooks now.

    UCX then rewrites `mmap`, `madvise` and related functions of the C library in place. A thread inside one
    of them at that moment crashes. So call this while there is one thread, and before large memory is mapped.
    Raises StartupError.
    """
    try:
        Library().new_agent("baton-memory-hooks")
    except TransferError as error:
        raise StartupError(str(error)) from error


def framed(metadata: bytes) -> bytes:
    """Return NIXL's agent metadata with a magic number and a digest in front."""
    return MAGIC + hashlib.sha256(metadata).digest()[:DIGEST_BYTES] + metadata


def unframed(peer: Endpoint) -> bytes:
    """Return NIXL's agent metadata from a peer's endpoint. Raises TransferError if its digest
    does not match."""
    head = len(MAGIC) + DIGEST_BYTES
    metadata = peer.metadata[head:]
    if peer.metadata[:head] != framed(metadata)[:head]:
        raise TransferError(f"endpoint {peer.agent}: its metadata is damaged, or not NIXL's")
    return metadata
