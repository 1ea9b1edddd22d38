"""Call by which a worker's starter reports to the bootstraps that the worker's process has exited."""

import asyncio
from collections.abc import Sequence

import grpc

from baton.runtime.tls_files import TlsFiles
from baton.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from baton.wire.channel import UNARY_S, open_channel
from baton.wire.errors import RemoteError, remote_error
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity


async def report_exit(
    bootstrap: str, tls: TlsFiles | None, run_token: str, name: str, pid: int, secret: bytes
) -> None:
    """Report to the bootstrap that process `pid` of worker `name` has exited.

    The report is the proof "dead": none of the process's writes can land any more. `secret`: drawn for that
    process when it was started. Raises RemoteError if the report is refused.
    """
    channel = open_channel(bootstrap, ServiceRole.BOOTSTRAP, Identity.of(tls), run_token)
    try:
        stub = workers_pb2_grpc.WorkerRegistryStub(channel)
        await stub.ReportExit(
            workers_pb2.ReportExitRequest(name=name, pid=pid, secret=secret), timeout=UNARY_S
        )
    except grpc.aio.AioRpcError as error:
        raise remote_error(error) from error
    finally:
        await channel.close()


async def report_exit_to_all(
    bootstraps: Sequence[str], tls: TlsFiles | None, run_token: str, name: str, pid: int, secret: bytes
) -> None:
    """Report to all bootstraps at once that a process has exited (see `report_exit`).

    Raises RemoteError if one of them could not be reached, else if one refused the report. Reporting again to
    one that has believed it changes nothing.
    """
    reports = (report_exit(each, tls, run_token, name, pid, secret) for each in bootstraps)
    results = await asyncio.gather(*reports, return_exceptions=True)
    errors = [each for each in results if isinstance(each, BaseException)]
    remote = [each for each in errors if isinstance(each, RemoteError)]
    for error in (*(each for each in errors if each not in remote), *sorted(remote, key=_answered)):
        raise error


def _answered(error: RemoteError) -> bool:
    return not error.unreachable
