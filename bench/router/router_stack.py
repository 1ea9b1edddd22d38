"""The processes of `bench router`: real bootstraps, and workers that answer at once."""

import asyncio
import os
import secrets
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import httpx

from baton.launch.child import Child, start_child
from baton.models.model_facts import read_model
from baton.rooms.request import Request, Sampling
from baton.runtime.child_process import module_command
from baton.runtime.errors import StartupError
from baton.runtime.listening_ports import port_of, reserve_port
from baton.runtime.settings import PREFIX
from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc, rooms_pb2
from baton.wire.channel import Channels
from baton.wire.conversions import request_to_wire
from baton.wire.service_role import ServiceRole

HOST: Final = "127.0.0.1"
READY_S: Final = 120.0
STOP_S: Final = 10.0
LOOK_S: Final = 0.05
PROMPT: Final = tuple(range(1, 40))


class RouterStack:
    """One bootstrap on `core`, and further bootstraps and the echo workers, which all of them share, on
    another core if there is one."""

    def __init__(self, model: Path, core: int, routers: int = 1) -> None:
        self._model = model
        self._core = core
        self._routers = routers
        self._children: list[Child] = []
        self._channels = Channels()
        self._reserved = AsyncExitStack()
        self._workers: dict[str, tuple[str, int]] = {}
        """Address and incarnation of each worker, by side."""
        self.http_ports: list[int] = []
        self.model = ""

    @property
    def bootstrap_pid(self) -> int:
        """Process id of the bootstrap on `core`."""
        return self._children[0].pid

    async def __aenter__(self) -> "RouterStack":
        facts = read_model(self._model)
        self.model = facts.name
        ports = [port_of(self._reserved.enter_context(reserve_port(HOST))) for _ in range(2 * self._routers)]
        self.http_ports, grpc_ports = ports[: self._routers], ports[self._routers :]
        cores = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {self._core})
            for http_port, grpc_port in zip(self.http_ports, grpc_ports, strict=True):
                await self._start_bootstrap(http_port, grpc_port)
                os.sched_setaffinity(0, cores - {self._core} or cores)
            bootstraps = ",".join(f"{HOST}:{port}" for port in grpc_ports)
            asked = (bootstraps, facts.fingerprint, str(facts.context_length))
            await self._start("echo", "bench.router.router_echo", *asked)
            await self._ready()
        except BaseException:
            await self.__aexit__()
            raise
        finally:
            os.sched_setaffinity(0, cores)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channels.close()
        for child in reversed(self._children):
            child.terminate()
        for child in self._children:
            try:
                await asyncio.wait_for(child.wait(), STOP_S)
            except TimeoutError:
                child.kill()
        await self._reserved.aclose()

    async def ask_directly(self, tokens: int) -> float:
        """Return the seconds of a request that calls both workers directly, without a router."""
        room = secrets.randbits(60) | 1
        request = request_to_wire(
            Request("direct", PROMPT, tokens, sampling=Sampling(temperature=0.0, seed=tokens))
        )
        (prefill_at, prefill), (decode_at, decode) = self._workers["prefill"], self._workers["decode"]
        run = inference_pb2.RunRoomRequest(
            room=room,
            incarnation=prefill,
            decode=rooms_pb2.Peer(name="d", incarnation=decode, address=decode_at),
            request=request,
        )
        stream = inference_pb2.StreamRoomRequest(
            room=room,
            incarnation=decode,
            prefill=rooms_pb2.Peer(name="p", incarnation=prefill, address=prefill_at),
            request=request,
        )
        prefill_stub = inference_pb2_grpc.PrefillServiceStub(
            self._channels.to(prefill_at, ServiceRole.PREFILL)
        )
        decode_stub = inference_pb2_grpc.DecodeServiceStub(self._channels.to(decode_at, ServiceRole.DECODE))
        started = time.perf_counter()
        replies = aiter(prefill_stub.RunRoom(run, timeout=READY_S))
        answer = decode_stub.StreamRoom(stream, timeout=READY_S)
        await anext(replies)
        async for _ in answer:
            pass
        seconds = time.perf_counter() - started
        async for _ in replies:
            pass
        return seconds

    async def _start_bootstrap(self, http_port: int, grpc_port: int) -> None:
        flags = {"model": self._model, "host": HOST, "http-port": http_port, "grpc-port": grpc_port}
        told = [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
        await self._start("bootstrap", "baton.cli.main", "bootstrap", *told, "--log-level", "warning")

    async def _start(self, name: str, *command: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        child = await start_child(name, module_command(*command), environ, lambda _: True, self._read_line)
        self._children.append(child)

    def _read_line(self, line: str) -> None:
        name, _, rest = line.partition(": ")
        words = rest.split()
        if name == "echo" and len(words) == 3 and words[0] in ("prefill", "decode"):
            self._workers[words[0]] = (words[1], int(words[2]))
        else:
            print(line, file=sys.stderr)

    async def _ready(self) -> None:
        try:
            async with asyncio.timeout(READY_S):
                for port in self.http_ports:
                    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", trust_env=False) as http:
                        while not await _answers(http):  # noqa: ASYNC110
                            await asyncio.sleep(LOOK_S)
        except TimeoutError:
            text = f"the bootstraps and their echo workers were not ready in {READY_S:g} s"
            raise StartupError(text) from None


async def _answers(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/ready")).is_success
    except httpx.TransportError:
        return False
