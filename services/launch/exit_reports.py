"""Reports to the bootstraps that a worker's process has exited, sent by the process that started it."""

import asyncio
from typing import Final

from baton.runtime.errors import describe_error
from baton.runtime.settings import PREFIX
from baton.wire.receiver_secret import digest_of, draw_secret
from baton.worker.lifecycle.lazy_exit_report import ReportExit

REPORT_TIMEOUT_S: Final = 2.0
REPORT_TRIES: Final = 5

EXIT_DIGEST: Final = f"{PREFIX}EXIT_DIGEST"
"""Environment variable that gives a worker's process the digest of its starter's secret."""


def draw_exit_secret() -> tuple[bytes, dict[str, str]]:
    """Return a new secret for one start of a process, and environment variables for it (`exit-by-starter`).

    The secret stays with the starter. The process gets only its digest, so that a reader of its environment
    cannot report its exit.
    """
    secret = draw_secret()
    return secret, {EXIT_DIGEST: digest_of(secret).hex()}


async def report_exit_repeatedly(
    report: ReportExit, name: str, pid: int, secret: bytes, stopping: asyncio.Event
) -> str | None:
    """Report the exit of a process, up to REPORT_TRIES times, until it succeeds or `stopping` is set.

    Return None if it succeeded or `stopping` was set, else the reason why it failed. It raises nothing,
    because the worker has to be restarted in any case.
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
    """Sleep for `timeout_s` seconds, or until `event` is set."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
