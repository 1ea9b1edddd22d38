"""TLS certificate and key of a process for gRPC, and the certificate authority that it trusts.

Both ends of a connection show a certificate of the one authority. A client checks that the server has the
role that it means to call. `baton.wire.method_authorization` says which role may call which method.
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
    """Certificate, key and authority of this process, re-read when their files change.

    It is used from several threads, because gRPC calls it from its own.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the certificate files. Raises StartupError if they cannot be used."""
        self._files = files
        self._changes = FileChanges(files.paths)
        self._lock = Lock()
        self._version = 0
        self._ca, self._pair = _read(files)

    @staticmethod
    def of(files: TlsFiles | None) -> "Identity | None":
        """Return the TLS identity of this process, read from the files `files`. None for plain connections,
        if `files` is None.

        Raises StartupError.
        """
        return None if files is None else Identity(files)

    def version(self) -> int:
        """Return a number that grows each time the files have changed to a usable certificate."""
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
        """Return gRPC credentials for a server that asks every client for a certificate.

        A connection that begins after the files changed uses the new certificate.
        """
        shown = self.version()

        def changed() -> Any | None:
            nonlocal shown
            before, shown = shown, self.version()
            return None if before == shown else self._configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), changed, require_client_authentication=True
        )

    def channel(self) -> grpc.ChannelCredentials:
        """Return gRPC credentials for a client channel.

        A channel keeps its credentials for life. So `Channels` opens another one when it has to connect anew.
        """
        self.version()
        return grpc.ssl_channel_credentials(self._ca, *self._pair)

    def _configuration(self) -> Any:
        return grpc.ssl_server_certificate_configuration([self._pair], self._ca)


def _read(files: TlsFiles) -> tuple[bytes, tuple[bytes, bytes]]:
    """Return the authority's certificate, and the pair of key and certificate. Raises StartupError unless
    they match."""
    if files.ca is None:
        raise StartupError(f"{files.flags}-ca is needed: whose certificates are believed")
    files.context()
    return files.read(files.ca), (files.read(files.key), files.read(files.cert))
