"""TLS identity of a process over gRPC, and the authority that it trusts.

Each side of a connection shows a certificate of the one authority. A caller checks that the server is the
party it means to call. `baton.wire.method_authorization` says which party may call what.
"""

from threading import Lock
from typing import Any

import grpc

from baton.runtime.errors import StartupError
from baton.runtime.file_changes import FileChanges
from baton.runtime.logging import Log
from baton.runtime.tls_files import UNUSABLE, TlsFiles

log = Log(__name__)


class Identity:
    """Certificate, key and authority of one process, as its files have them now. Used from several threads,
    since gRPC asks from its own."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises StartupError for files that cannot be used."""
        self._files = files
        self._changes = FileChanges(files.paths)
        self._lock = Lock()
        self._version = 0
        self._ca, self._pair = _read(files)

    @staticmethod
    def of(files: TlsFiles | None) -> "Identity | None":
        """Return the identity of `files`, or None for plain connections. Raises StartupError."""
        return None if files is None else Identity(files)

    def version(self) -> int:
        """Return a number that grows when the files have changed to others that can be used."""
        with self._lock:
            if self._changes.seen():
                try:
                    self._ca, self._pair = _read(self._files)
                except StartupError as error:
                    log.error(UNUSABLE, cause=str(error))  # noqa: TRY400
                else:
                    self._version += 1
                    log.info("a changed certificate was read", file=str(self._files.cert))
            return self._version

    def server(self) -> grpc.ServerCredentials:
        """Return credentials of a server that asks every caller for a certificate. A connection that begins
        after the files changed uses the new ones."""
        shown = self.version()

        def changed() -> Any | None:
            nonlocal shown
            before, shown = shown, self.version()
            return None if before == shown else self._configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), changed, require_client_authentication=True
        )

    def channel(self) -> grpc.ChannelCredentials:
        """Return credentials of a channel. A channel keeps those it was opened with, so `Channels` opens
        another when it has to connect anew."""
        self.version()
        return grpc.ssl_channel_credentials(self._ca, *self._pair)

    def _configuration(self) -> Any:
        return grpc.ssl_server_certificate_configuration([self._pair], self._ca)


def _read(files: TlsFiles) -> tuple[bytes, tuple[bytes, bytes]]:
    """Read the authority, and the key and certificate. Raises StartupError unless they match."""
    if files.ca is None:
        raise StartupError(f"{files.flags}-ca is needed: whose certificates are believed")
    files.context()
    return files.read(files.ca), (files.read(files.key), files.read(files.cert))
