"""How does the bootstrap learn that a worker's process is gone, from whoever saw it exit?"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from baton.runtime.errors import describe_error
from baton.runtime.settings import PREFIX
from baton.runtime.tls_files import TlsFiles
from baton.wire.receiver_secret import digest_of, draw_secret

REPORT_TIMEOUT_S: Final = 2.0
REPORT_TRIES: Final = 5

EXIT_DIGEST: Final = f"{PREFIX}EXIT_DIGEST"
"""The variable by which a worker's process gets the digest of its starter's secret."""

ReportExit = Callable[[str, int, bytes], Awaitable[None]]
"""Reports to the bootstrap that the worker's process (name, pid) was seen to exit, with the secret drawn for
that process. Raises when it could not."""


def draw_exit_secret() -> tuple[bytes, dict[str, str]]:
    """A secret for one start of a process, and the variables that this process gets (`exit-by-starter`).

    The secret stays with the starter. The process gets its digest alone: whoever reads the environment of the
    process cannot report its exit.
    """
    secret = draw_secret()
    return secret, {EXIT_DIGEST: digest_of(secret).hex()}


def reporter(bootstrap_address: str, tls: TlsFiles | None, run_token: str = "") -> ReportExit:
    """Tells the bootstrap at `bootstrap_address`; gRPC is loaded only when something has to be told."""

    async def report(name: str, pid: int, secret: bytes) -> None:
        from baton.wire.exit_report import report_exit

        await report_exit(bootstrap_address, tls, run_token, name, pid, secret)

    return report


async def report_exit_repeatedly(
    report: ReportExit, name: str, pid: int, secret: bytes, stopping: asyncio.Event
) -> str | None:
    """Report it, several times if need be, but not beyond `stopping`. Returns why it could not be told.

    Whatever keeps the report from arriving must not keep the worker from coming back.
    """
    reason = None
    for _ in range(REPORT_TRIES):
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                await report(name, pid, secret)
        except Exception as error:
            reason = describe_error(error)
        else:
            return None
        await wait(stopping, REPORT_TIMEOUT_S / REPORT_TRIES)
        if stopping.is_set():
            return None
    return reason


async def wait(event: asyncio.Event, timeout_s: float) -> None:
    """Sleep, but not beyond `event`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
