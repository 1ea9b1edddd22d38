"""Runs `baton serve` for tests and reads its logs, timelines and streamed replies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from tests.http import web
from tests.ports import free_port
from tests.process.stack import READY_S, STOP_S

RUN_TOKEN: Final = "a-token-of-the-tests-0123"


@dataclass
class Served:
    """A whole stack, started as a person does, with its log in JSON."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    model: str = ""

    def lines(self) -> list[dict[str, Any]]:
        """Return the log lines of all parts so far, as fields."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            part, _, entry = line.partition(": ")
            if entry.startswith("{"):
                found.append({"part": part, **json.loads(entry)})
        return found

    def wait_lines(self, message: str, parts: Sequence[str]) -> list[dict[str, Any]]:
        """Wait until each part has logged the message, and return the last such line of each."""
        deadline = time.monotonic() + READY_S
        while True:
            last = {line["part"]: line for line in self.lines() if line["message"] == message}
            if last.keys() >= set(parts):
                return [last[part] for part in parts]
            assert time.monotonic() < deadline, last
            time.sleep(0.05)

    def body(self, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}

    def rooms(self, request_id: str) -> list[dict[str, Any]]:
        """Return the rooms of one request, newest first."""
        reply = web().get(f"{self.url}/rooms", params={"request_id": request_id})
        found: list[dict[str, Any]] = reply.json()["rooms"]
        return found

    def pid_of(self, worker: str) -> int:
        """Return the process id of the worker's own process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child.pid for child in children if worker in child.cmdline())

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while "Ready:" not in self.log.read_text(errors="replace"):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        self.model = web().get(f"{self.url}/v1/models").json()["data"][0]["id"]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)


def others_variables(folder: Path) -> dict[str, str]:
    """Return environment variables of other programs on a machine, none of which is meant for Baton."""
    nowhere = "http://127.0.0.1:1"  # whose port only the system's administrator can listen on
    missing = str(folder / "not-there")
    given = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), nowhere)
    given |= {"no_proxy": "", "NO_PROXY": "", "HF_ENDPOINT": nowhere, "TRANSFORMERS_OFFLINE": "0"}
    given |= {
        "GRPC_ADDRESS_HTTP_PROXY": "127.0.0.1:1",
        "GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES": "127.0.0.0/8",
    }
    given |= dict.fromkeys(("PROMETHEUS_MULTIPROC_DIR", "HF_HOME", "SSL_CERT_FILE"), missing)
    given |= {"GOMP_CPU_AFFINITY": "0", "OMP_PLACES": "{0}", "OMP_PROC_BIND": "true"}
    given |= {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "7", "MASTER_ADDR": "127.0.0.1"}
    return given | {"MASTER_PORT": "1", "ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}


@contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[Served]:
    """Run `baton serve` in an environment full of other programs' variables, which must not affect it."""
    log, port = folder / "serve.log", free_port()
    command = [sys.executable, "-m", "baton.cli.main", "serve", "--port", str(port), "--grpc-port", "0"]
    command += ["--model", str(model), "--kv-cache-memory", "128MiB", *flags]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("BATON_", "OTEL_"))}
    environ |= others_variables(folder) | {"BATON_RUN_TOKEN": RUN_TOKEN}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environ)
    served = Served(process, log, f"http://127.0.0.1:{port}")
    try:
        served.wait_ready()
        yield served
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(STOP_S)


def events_of(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed reply as they come."""
    for line in reply.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def in_order(names: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether `wanted` occur among `names` in this order."""
    rest = iter(names)
    return all(each in rest for each in wanted)
