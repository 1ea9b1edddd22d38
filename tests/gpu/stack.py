"""Part of the kit that serves with a whole stack, and kills a decode worker in mid-stream.

`baton serve` with one prefill and two decode workers, which share one GPU: 64 requests, of which each output
is the reference's; a stream whose decode worker is killed goes on as if nothing had been; afterwards every
gauge is back where it was. This part is torch's engine; `vllm_engine` has vLLM's.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import httpx

from baton.runtime.listening_ports import port_of, reserve_port
from bench.serving.system import System, SystemSpec
from tests.gpu.findings import CannotRun, Finding
from tests.gpu.kit import MARGIN_S, Kit
from tests.gpu.models import served
from tests.http import greedy
from tests.idle import POLL_S, Gauges, at_rest, not_back
from tests.models.eight_heads import EIGHT_HEADS
from tests.oracle import reference_behind
from tests.ports import HOST, free_neighbours
from tests.process.stack import gauges_of

REQUESTS: Final = 64
AT_A_TIME: Final = 16
OUTPUT_TOKENS: Final = 12
STREAMED_TOKENS: Final = 300
KILL_AT: Final = 20
ANSWER_S: Final = 60.0
WORKERS: Final = ("prefill-0", "decode-0", "decode-1")
STARTS_S: Final = 45.0
SMALLER: Final = 4
"""Divisor of the work on a CPU, where only the kit itself is tried."""

Reference = Callable[[Sequence[Sequence[int]]], list[list[int]]]
"""Returns the right outputs, or their beginnings, for the outputs of all prompts."""


@dataclass(frozen=True)
class Served:
    """A stack that is ready."""

    url: str
    metrics: dict[str, str]
    """Base URL of each worker's /metrics."""
    log: Path
    ready_s: float
    """Longest time in which a worker gets ready, seconds."""

    def pid_of(self, worker: str) -> int:
        """Raises AssertionError where it does not run."""
        words = ("--metrics-port", self.metrics[worker].rpartition(":")[2])
        for process in Path("/proc").iterdir():
            if process.name.isdecimal():
                try:
                    told = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                except OSError:
                    continue
                if worker.partition("-")[0] in told and words in pairwise(told):
                    return int(process.name)
        raise AssertionError(f"{worker} does not run")

    def gauges(self) -> Gauges:
        return {name: gauges_of(url) for name, url in {**self.metrics, "bootstrap": self.url}.items()}

    def idle_gauges(self) -> Gauges:
        """Return the gauges once all workers are ready. Raises AssertionError where that does not come, or
        rooms are held all the time."""
        give_up = time.monotonic() + self.ready_s
        while self._ready_workers() < len(self.metrics):
            assert time.monotonic() < give_up, "not all workers are ready"
            time.sleep(POLL_S)
        now = at_rest(self.gauges)
        assert now is not None, "rooms are held"
        return now

    def _ready_workers(self) -> float:
        counts = gauges_of(self.url).items()
        return sum(
            count
            for (name, labels), count in counts
            if name == "baton_workers" and ("state", "ready") in labels
        )

    def wait_idle(self, start: Gauges) -> None:
        """Raises AssertionError, which says what is not where it was at `start`."""
        give_up = time.monotonic() + self.ready_s
        different = not_back(self.gauges, start)
        while different and time.monotonic() < give_up:  # a worker was killed, and is started again
            different = not_back(self.gauges, start)
        assert not different, "; ".join(different[:5])


def run(kit: Kit) -> None:
    model = served(EIGHT_HEADS, kit.folder / "eight-heads")
    flags = {"engine": "torch", "dtype": "float32", "compiled-steps": "false"}

    def reference(outputs: Sequence[Sequence[int]]) -> list[list[int]]:
        return reference_behind(model, prompts(kit), outputs, OUTPUT_TOKENS)

    check_stack(kit, model, flags, reference, STARTS_S, STREAMED_TOKENS)


def prompts(kit: Kit) -> list[list[int]]:
    """Return the prompts of the requests, of 1 to 86 tokens."""
    many = REQUESTS if kit.on_gpu else REQUESTS // SMALLER
    return [[(7 * index + 3 * place) % 900 for place in range(1 + 5 * index % 90)] for index in range(many)]


def check_stack(
    kit: Kit,
    model: Path,
    flags: Mapping[str, object],
    reference: Reference,
    starts_s: float,
    streamed: int,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Note what a stack does that serves `model` with these flags.

    `reference`: returns the right outputs. `starts_s`: longest time in which a worker gets ready, seconds.
    `streamed`: tokens of the stream whose worker is killed. `environ`: further variables of the stack.
    """
    note, many = kit.findings.note, len(prompts(kit))
    engine = flags["engine"]
    with ExitStack() as running:
        stacks: list[Served] = []

        def start(found: Finding) -> None:
            started = time.monotonic()
            stacks.append(running.enter_context(_serving(kit, model, flags, starts_s, environ or {})))
            found.figures = {"ready_s": round(time.monotonic() - started, 1)}

        device = kit.device.partition(":")[0]
        note(f"baton serve --engine {engine} --device {device} gets ready", start, starts_s)
        idle = stacks[0].idle_gauges() if stacks else {}
        note(
            f"{many} requests, {AT_A_TIME} at a time: each output is the reference's",
            lambda found: _many(_only(stacks), reference, kit, found),
            20,
        )
        note(
            "a decode worker killed in mid-stream is not noticed",
            lambda found: _killed(_only(stacks), streamed, found),
            20,
        )
        note("zero at idle: every gauge is back", lambda _: _only(stacks).wait_idle(idle), 5)


def _only(stacks: Sequence[Served]) -> Served:
    if not stacks:
        raise CannotRun("the stack did not get ready")
    return stacks[0]


@contextmanager
def _serving(
    kit: Kit, model: Path, flags: Mapping[str, object], starts_s: float, environ: Mapping[str, str]
) -> Iterator[Served]:
    with reserve_port(HOST) as reserved:
        address = f"http://{HOST}:{port_of(reserved)}"
        first = free_neighbours(len(WORKERS))
        flags = {
            **flags,
            "port": port_of(reserved),
            "grpc-port": 0,
            "metrics-port": first,
            "model": model,
            "device": kit.device.partition(":")[0],
            "decode": 2,
            "local-gap-ms": 0,  # all prompts are handed over
            "kv-cache-memory": "64MiB",
            "log-level": "info",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        log = kit.folder / "serve.log"
        spec = SystemSpec(
            name="baton serve",
            url=address,
            start=(sys.executable, "-m", "baton.cli.main", "serve", *words),
            ready=(f"{address}/ready",),
            ready_timeout_s=max(1, int(kit.findings.left_s - MARGIN_S)),
        )
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        system = System(spec, log, Path.cwd(), {**clean, "NO_COLOR": "1", **environ})
        metrics = {name: f"http://{HOST}:{first + place}" for place, name in enumerate(WORKERS)}
        try:
            system.start()
            yield Served(address, metrics, log, starts_s)
        finally:
            system.end()


def _many(stack: Served, reference: Reference, kit: Kit, found: Finding) -> None:
    started = time.monotonic()
    outputs = asyncio.run(_all(stack.url, prompts(kit)))
    spent = time.monotonic() - started
    expected = reference(outputs)
    wrong = [
        f"prompt {index}: {got}, expected {want}"
        for index, (got, want) in enumerate(zip(outputs, expected, strict=True))
        if got != want
    ]
    found.detail = f"{len(outputs)} in {spent:.1f} s"
    assert not wrong, "; ".join(wrong[:3])
    place = "device=cuda" if kit.on_gpu else "device=cpu"
    ready = [line for line in stack.log.read_text().splitlines() if "engine ready" in line]
    assert len(ready) >= len(WORKERS), "not every worker tells that it is ready"
    assert all(place in line for line in ready), f"a worker computes elsewhere: {ready}"


async def _all(url: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    places = asyncio.Semaphore(AT_A_TIME)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def one(prompt: Sequence[int]) -> list[int]:
            async with places:
                reply = await client.post("/v1/completions", json=greedy(model, prompt, OUTPUT_TOKENS))
            assert reply.status_code == 200, reply.text
            ids: list[int] = reply.json()["choices"][0]["token_ids"]
            return ids

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def _killed(stack: Served, tokens: int, found: Finding) -> None:
    """Check that a stream goes on with the same tokens when its decode worker is killed, against an unbroken
    one."""
    unbroken, _ = _stream(stack, "unbroken", tokens, kill=False)
    broken, victim = _stream(stack, "broken", tokens, kill=True)
    with httpx.Client(base_url=stack.url, timeout=ANSWER_S, trust_env=False) as client:
        rooms = client.get("/rooms", params={"request_id": "broken"}).json()["rooms"]
    found.detail = f"{victim} was killed after {KILL_AT} of {len(unbroken)} tokens; {len(rooms)} rooms"
    assert len(unbroken) == tokens
    assert broken == unbroken, "the stream went on with other tokens"
    assert len(rooms) == 2, f"{len(rooms)} rooms of the request: it had ended before its worker was killed"


def _stream(stack: Served, name: str, tokens: int, *, kill: bool) -> tuple[list[int], str]:
    """Stream a request, kill its decode worker, and return the tokens and the killed worker."""
    ids: list[int] = []
    victim = ""
    with httpx.Client(base_url=stack.url, timeout=ANSWER_S, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {**greedy(model, range(3, 60), tokens), "stream": True}
        headers = {"X-Request-Id": name}
        with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                told = json.loads(line[6:])
                assert "error" not in told, told["error"]
                for choice in told["choices"]:
                    ids += choice.get("token_ids") or []
                if kill and not victim and len(ids) >= KILL_AT:
                    rooms = client.get("/rooms", params={"request_id": name}).json()["rooms"]
                    victim = rooms[0]["decode"]
                    os.kill(stack.pid_of(victim), signal.SIGKILL)
    return ids, victim
