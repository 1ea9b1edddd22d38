"""Function that reports exits of processes to all bootstraps, and loads gRPC at its first call.

Launchers fork, and gRPC has to be loaded after that.
"""

from collections.abc import Awaitable, Callable, Sequence

from baton.runtime.tls_files import TlsFiles
from baton.wire.bootstrap_addresses import BootstrapAddresses

ReportExit = Callable[[str, int, bytes], Awaitable[None]]
"""Function that reports to all bootstraps that a worker's process has exited.

Its arguments are the worker's name, the process id, and the secret drawn for that process. It raises if the
report did not arrive.
"""


def reporter(bootstraps: Sequence[str], tls: TlsFiles | None, run_token: str = "") -> ReportExit:
    """Return a function that reports exits to all bootstraps that an entry of `bootstraps` names. Its first
    call loads gRPC."""
    addresses = BootstrapAddresses(bootstraps)

    async def report(name: str, pid: int, secret: bytes) -> None:
        from baton.worker.lifecycle.exit_report import report_exit_to_all

        await report_exit_to_all(await addresses.look_up(), tls, run_token, name, pid, secret)

    return report
