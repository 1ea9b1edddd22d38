"""Certificates of the tests: a stack's own, and another authority's."""

from collections.abc import Sequence
from pathlib import Path

from baton.cli.certs import make_certs
from baton.runtime.tls_files import TlsFiles

LOCAL = ("localhost", "127.0.0.1")


def made(folder: Path, names: Sequence[str] = LOCAL) -> Path:
    make_certs(folder, list(names))
    return folder


def of(folder: Path, name: str) -> TlsFiles:
    """Return the TLS files of a party, with its authority."""
    return TlsFiles(folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt")


def flags(folder: Path, name: str) -> dict[str, str]:
    """Return the TLS flags of a command line, by name."""
    files = of(folder, name)
    return {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_ca": str(files.ca)}
