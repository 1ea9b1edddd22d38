"""A server in a process of its own, and the memory that it has while many long texts are sent at once.

python -m tests.api.flooded 32 4194304     the numbers of so many texts of so many bytes
"""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import httpx

PATIENCE_S: Final = 300.0
SETTLE_S: Final = 3.0
CONTEXT: Final = 10**9
"""Context in which no text is refused by its length alone."""


@dataclass
class Flooded:
    statuses: dict[str, int]
    """Number of long texts by status."""
    others: dict[str, int]
    """Number of short texts, sent meanwhile, by status."""
    before_kib: int
    most_kib: int
    after_kib: int


def memory(pid: int, field: str) -> int:
    """Return a field of a process's memory, KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def flood(texts: int, size: int) -> Flooded:
    server = subprocess.Popen([sys.executable, "-m", "tests.api.flooded"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        return asyncio.run(_flood(int(server.stdout.readline()), server.pid, texts, size))
    finally:
        server.kill()
        server.wait()


async def _flood(port: int, pid: int, texts: int, size: int) -> Flooded:
    url = f"http://127.0.0.1:{port}"
    short = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    long = json.dumps({"model": "tiny", "prompt": "a " * (size // 2)}).encode()
    done = asyncio.Event()
    others: dict[str, int] = {}
    statuses: dict[str, int] = {}
    most_kib = 0

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:

        async def ask_for_little() -> None:
            nonlocal most_kib
            while not done.is_set():
                reply = await http.post("/v1/chat/completions", json=short)
                others[str(reply.status_code)] = others.get(str(reply.status_code), 0) + 1
                most_kib = max(most_kib, memory(pid, "VmRSS"))
                await asyncio.sleep(0.01)

        async def ask_for_much(at: int) -> None:
            path = "/tokenize" if at % 2 else "/v1/completions"
            headers = {"Content-Type": "application/json"}
            reply = await http.post(path, content=long, headers=headers)
            statuses[str(reply.status_code)] = statuses.get(str(reply.status_code), 0) + 1

        for _ in range(20):
            await http.post("/v1/chat/completions", json=short)
        before_kib = memory(pid, "VmRSS")
        little = asyncio.create_task(ask_for_little())
        await asyncio.gather(*map(ask_for_much, range(texts)))
        await asyncio.sleep(SETTLE_S)
        done.set()
        await little
        return Flooded(statuses, others, before_kib, most_kib, memory(pid, "VmRSS"))


async def _serve() -> None:
    from prometheus_client import CollectorRegistry

    from baton.api.app import create_app
    from baton.api.backend import Limits
    from baton.runtime.listening_ports import bind_port
    from baton.web.http_server import serve_http
    from tests.api import tiny
    from tests.api.scripted import ScriptedBackend

    backend = ScriptedBackend(known_limits=Limits(CONTEXT, 0, 0))
    backend.asked = Forgetful()
    backend.streams = Forgetful()
    app = create_app(backend, tiny.model(), CollectorRegistry())
    server = await serve_http(app, bind_port("127.0.0.1", 0, ""), 1, answers_refusals=True)
    print(server.port, flush=True)  # noqa: T201
    await asyncio.Event().wait()


class Forgetful(list):  # type: ignore[type-arg]
    """A list that stores nothing: requests that a backend got would count as memory."""

    def append(self, _: object) -> None:
        pass


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if len(sys.argv) == 1:
        asyncio.run(_serve())
    else:
        print(json.dumps(asdict(flood(int(sys.argv[1]), int(sys.argv[2])))))  # noqa: T201
