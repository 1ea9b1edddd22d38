"""A TCP proxy that cuts a connection on which its server sent nothing for a while, as load balancers do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

TICK_S: Final = 0.01
CHUNK_BYTES: Final = 65_536


@dataclass
class CuttingProxy:
    """A proxy that cuts silent connections after some turns of the event loop that it shares with its server.
    A busy machine makes these turns longer, for the server's timers as for the proxy."""

    server_port: int
    idle_ticks: int
    """Turns of at least TICK_S seconds after which a silent connection is cut."""
    port: int = 0
    cuts: int = 0
    aged: int = 0
    """Connections that were opened so long ago that a silent one has been cut."""

    async def _age(self) -> None:
        for _ in range(self.idle_ticks + self.idle_ticks // 2):
            await asyncio.sleep(TICK_S)
        self.aged += 1

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """Return the server's next bytes. Raises TimeoutError after `idle_ticks` turns without any."""
        reading = asyncio.create_task(reader.read(CHUNK_BYTES))
        for _ in range(self.idle_ticks):
            if (await asyncio.wait({reading}, timeout=TICK_S))[0]:
                return reading.result()
        reading.cancel()
        raise TimeoutError

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self.server_port)
        aging = asyncio.create_task(self._age())
        sending = asyncio.create_task(_copy(reader, to_server))
        try:
            while chunk := await self._read(from_server):
                writer.write(chunk)
        except TimeoutError:
            self.cuts += 1
        finally:
            sending.cancel()
            writer.close()
            to_server.close()
        await aging


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)


@asynccontextmanager
async def cutting_proxy(server_port: int, idle_ticks: int) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(server_port, idle_ticks)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
