"""A TCP proxy that cuts a connection on which its server sent nothing for a while, as load balancers do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

CHUNK_BYTES: Final = 65_536


@dataclass
class CuttingProxy:
    server_port: int
    idle_s: float
    port: int = 0
    cuts: int = 0
    aged: int = 0
    """Connections that were opened so long ago that a silent one has been cut."""

    def _age(self) -> None:
        self.aged += 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self.server_port)
        asyncio.get_running_loop().call_later(1.5 * self.idle_s, self._age)
        sending = asyncio.create_task(_copy(reader, to_server))
        try:
            while chunk := await asyncio.wait_for(from_server.read(CHUNK_BYTES), self.idle_s):
                writer.write(chunk)
        except TimeoutError:
            self.cuts += 1
        finally:
            sending.cancel()
            writer.close()
            to_server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)


@asynccontextmanager
async def cutting_proxy(server_port: int, idle_s: float) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(server_port, idle_s)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
