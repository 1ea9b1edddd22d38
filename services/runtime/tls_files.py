"""Files of a TLS certificate, its private key and a trusted certificate authority."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.runtime.errors import SettingsError, StartupError
from baton.runtime.file_changes import FileChanges
from baton.runtime.logging import Log

log = Log(__name__)

UNUSABLE: Final = "a changed certificate cannot be used: the former one stays"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the PEM files for TLS. The files are read when they are used, and their contents are never
    shown."""

    cert: Path
    key: Path
    ca: Path | None = None
    flags: str = "--tls"
    """Prefix of the flags that name these files, such as `--tls`, for error texts."""

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.cert, self.key) if self.ca is None else (self.cert, self.key, self.ca)

    def read(self, path: Path) -> bytes:
        """Return the contents of the PEM file at `path`. Raises StartupError."""
        try:
            return path.read_bytes()
        except OSError as error:
            which = {self.cert: "cert", self.key: "key"}.get(path, "ca")
            raise StartupError(f"{self.flags}-{which} {path} cannot be read: {error.strerror}") from None

    def context(self) -> ssl.SSLContext:
        """Return a server's TLS context. Raises StartupError for files that do not match each other."""
        for path in self.paths:
            self.read(path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key, password=lambda: "")  # no prompt on a terminal
        except (OSError, ValueError) as error:
            raise StartupError(
                f"{self.flags}-cert {self.cert} and {self.flags}-key {self.key} are not a certificate and its"
                f" unencrypted key in PEM: {_reason(error)}"
            ) from None
        if self.ca is not None:
            self._believe(context, "ca", self.ca)
        return context

    def pinned(self) -> ssl.SSLContext:
        """Return a client's TLS context that trusts only this certificate itself, whatever host names it
        contains.

        Raises StartupError.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        self._believe(context, "cert", self.cert)
        return context

    def _believe(self, context: ssl.SSLContext, which: str, path: Path) -> None:
        self.read(path)
        try:
            context.load_verify_locations(path)
        except (OSError, ValueError) as error:
            text = f"{self.flags}-{which} {path} holds no certificate in PEM: {_reason(error)}"
            raise StartupError(text) from None


def tls_files(cert: str, key: str, ca: str | None = None, flags: str = "--tls") -> TlsFiles | None:
    """Return the paths of the TLS files, or None if none is given. Raises SettingsError if only some are
    given."""
    given = {"cert": cert, "key": key} | ({} if ca is None else {"ca": ca})
    missing = [f"{flags}-{name}" for name, path in given.items() if not path]
    if len(missing) == len(given):
        return None
    if missing:
        present = [f"{flags}-{name}" for name, path in given.items() if path]
        raise SettingsError(
            f"{' and '.join(present)} given without {' and '.join(missing)}: give all or none"
        )
    return TlsFiles(Path(cert), Path(key), Path(ca) if ca else None, flags)


def renewing(files: TlsFiles) -> ssl.SSLContext:
    """Return a server's TLS context that re-reads the files when they change.

    A connection that begins after a change gets the new certificate. Open connections go on. Raises
    StartupError.
    """
    changes = FileChanges(files.paths)
    first = latest = files.context()

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal latest
        if changes.seen():
            try:
                latest = files.context()
                log.info("a changed certificate was read", file=str(files.cert))
            except StartupError as error:
                log.error(UNUSABLE, cause=str(error))  # noqa: TRY400
        if latest is not first:
            connection.context = latest

    first.sni_callback = choose
    return first


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error) or type(error).__name__
