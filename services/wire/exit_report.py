"""Call by which a worker's starter reports to the bootstrap that the worker's process has exited."""

import grpc

from baton.runtime.tls_files import TlsFiles
from baton.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from baton.wire.channel import UNARY_S, open_channel
from baton.wire.errors import remote_error
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
