"""Command `baton certs`, which makes a certificate authority and certificates to try a stack with TLS.

It is meant for one machine or a test cluster, because the owner of `ca.key` can pose as any service of the
stack. Larger sites have an authority already. `docs/security.md` says what its certificates have to contain.
"""

import socket
from pathlib import Path
from typing import Annotated, Final

import typer

from baton.rooms.phases import Side
from baton.runtime.errors import StartupError
from baton.runtime.service_process import report_startup_error
from baton.wire.service_role import ServiceRole

LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")
DAYS: Final = 90
BOTH: Final = "worker"
"""File name of the certificate for a process that serves both prefill and decode."""


class CertsRefused(StartupError):
    """The certificates cannot be made in the given folder."""


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put them; made if missing.")],
    name: Annotated[
        list[str] | None,
        typer.Option(help="Name or address that clients ask the API at, beside this machine's. Repeatable."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long they are good.")] = DAYS,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there, the authority too.")] = False,
) -> None:
    """Make a development CA and the certificates of a stack: HTTPS, and mutual TLS between the services."""
    try:
        make_certs(folder, [*LOCAL_NAMES, socket.gethostname(), *(name or ())], days, replace=force)
    except StartupError as error:
        raise typer.Exit(report_startup_error(error)) from None
    print(_usage(folder))


def make_certs(folder: Path, names: list[str], days: int = DAYS, *, replace: bool = False) -> None:
    """Write the certificates of a stack to `folder`, as .crt and .key files.

    They are `ca`, one for each kind of service, and `http` for the host names `names`. Raises CertsRefused.
    """
    try:
        from baton.cli.authority import Authority, Pair
    except ImportError:
        raise CertsRefused("certificates need what is not installed: pip install cryptography") from None
    files = [
        folder / f"{each}.{end}" for each in ("ca", *ServiceRole, BOTH, "http") for end in ("crt", "key")
    ]
    there = [path.name for path in files if path.exists()]
    if there and not replace:
        raise CertsRefused(
            f"{folder} has {', '.join(there)}: choose another place, or replace all with --force"
        )
    authority = Authority("Baton development CA", days)
    pairs: dict[str, Pair] = {"ca": authority}
    try:
        pairs["http"] = authority.certify(list(dict.fromkeys(names)), both_ways=False)
    except ValueError as error:
        raise CertsRefused(str(error)) from None
    pairs |= {party: authority.certify([party.tls_name], both_ways=True) for party in ServiceRole}
    pairs[BOTH] = authority.certify([ServiceRole.of(side).tls_name for side in Side], both_ways=True)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in files:
            path.unlink(missing_ok=True)
        for each, pair in pairs.items():
            pair.write(folder / each)
    except OSError as error:
        raise CertsRefused(f"{folder} cannot be written: {error.strerror}") from None


def _usage(folder: Path) -> str:
    at = folder.resolve()
    return f"""\
Made a development CA and the certificates of a stack in {at}.

Everything on this machine:

  baton serve --tls-dir {at}
  export SSL_CERT_FILE={at}/ca.crt

Each service by itself, prefill and decode like this one (--http-… is for the bootstrap alone):

  baton bootstrap --tls-cert {at}/bootstrap.crt --tls-key {at}/bootstrap.key --tls-ca {at}/ca.crt \\
    --http-tls-cert {at}/http.crt --http-tls-key {at}/http.key

Give each service its own key alone. Keep ca.key out of every service: whoever has it can be any of them."""
