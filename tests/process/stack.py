"""Real services of the process tests.

As `baton serve` does: one process each, with a command line of its own, forked from what has everything
imported (`tests/forks.py`).
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton.both.settings import side_names
from baton.launch.exit_reports import draw_exit_secret
from baton.wire.baton.v1 import workers_pb2, workers_pb2_grpc
from baton.wire.errors import remote_error
from tests.forks import Process, clean_environ, fork_baton
from tests.http import web
from tests.idle import POLL_S, Gauges, Sample, at_rest, not_back
from tests.ports import free_port
from tests.process.hosts import Hosts
from tests.suite.marks import starts

READY_S = 180.0
STOP_S = 40.0
CALL_S = 5.0
SPLIT: Final[Mapping[str, str]] = {"local_gap_ms": "0"}
"""Settings of a decode worker that computes no prompt while a prefill worker is there."""

LISTENING = re.compile(r" listening (?:rank=(\d+) )?worker=\S+ .*?metrics_port=(\d+) pid=(\d+)")


@dataclass(frozen=True)
class Rank:
    """One process of a worker."""

    pid: int
    http: str
    """Base URL of its /metrics."""

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def gauges(self) -> dict[Sample, float]:
        return gauges_of(self.http)


@dataclass
class Service:
    """One running process. For a worker of several ranks it is their launcher."""

    name: str
    process: Process
    log: Path
    http: str
    """Base URL of its /metrics."""
    command: Sequence[str]
    other_side: str = ""
    """Base URL of the other side's /metrics in a process that serves both, else empty."""
    exit_secret: bytes = b""
    """Drawn when the process was started, to report its exit."""

    def metrics(self) -> dict[Sample, float]:
        """Return every sample of its /metrics, by name and labels."""
        text = web().get(f"{self.http}/metrics", timeout=10).text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def gauges(self) -> dict[Sample, float]:
        """Return every gauge of its /metrics, which is the leader's if there are several ranks."""
        return gauges_of(self.http)

    def ranks(self) -> list[Rank]:
        """Return the worker's processes as they were last started, the leader first."""
        latest: dict[int, Rank] = {}
        host = self.http.rpartition(":")[0]
        for rank, port, pid in LISTENING.findall(self.log.read_text(errors="replace")):
            latest[int(rank or 0)] = Rank(int(pid), f"{host}:{port}")
        return [latest[rank] for rank in sorted(latest)]

    def total(self, name: str) -> float:
        """Return the sum of one counter over all labels."""
        return sum(value for (sample, _), value in self.metrics().items() if sample == name)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S)

    def stop(self) -> int:
        """Send SIGTERM, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


FREE, CACHED = (("baton_kv_pages", (("state", state),)) for state in ("free", "cached"))


def gauges_of(http: str) -> dict[Sample, float]:
    """Return the gauges of a process. Cached pages count as free ones, since they are unused and given up
    when space is needed."""
    text = web().get(f"{http}/metrics", timeout=10).text
    gauges = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        if family.type == "gauge" and not family.name.endswith("_created")
        for sample in family.samples
    }
    if CACHED in gauges:
        gauges[FREE] += gauges.pop(CACHED)
    return gauges


@dataclass
class Stack:
    """A bootstrap and workers on free ports of this machine."""

    model: str
    folder: Path
    common: Mapping[str, str] = field(default_factory=dict)
    """Flags of every worker."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables of every process, beside this one's."""
    services: dict[str, Service] = field(default_factory=dict)
    http_port: int = field(default_factory=free_port)
    grpc_port: int = field(default_factory=free_port)
    further: Sequence[int] = ()
    """gRPC ports of further bootstraps."""
    hosts: Hosts | None = None
    """Hosts of the workers. None: all processes are on this one."""
    by_commands: bool = False
    """Start each process by its command line, as a pod does, and fork none."""
    _gone: set[str] = field(default_factory=set)
    """Incarnations that were killed: until its lease ends, the bootstrap still counts one as ready."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def start_bootstrap(self, **flags: str) -> Service:
        command = self._bootstrap_command(self.http_port, self.grpc_port)
        if self.hosts is not None:
            command += ["--grpc-host", self.hosts.address]
        return self._start("bootstrap", command, self.url, flags)

    def start_further_bootstraps(self, **flags: str) -> list[Service]:
        """Start the bootstraps at the ports `further`."""
        started = []
        for number, grpc_port in enumerate(self.further, start=1):
            http_port = free_port()
            command = self._bootstrap_command(http_port, grpc_port)
            url = f"http://127.0.0.1:{http_port}"
            started.append(self._start(f"bootstrap-{number}", command, url, flags))
        return started

    def _bootstrap_command(self, http_port: int, grpc_port: int) -> list[str]:
        command = ["bootstrap", "--http-port", str(http_port), "--grpc-port", str(grpc_port)]
        return [*command, "--peer-bootstraps", self.bootstraps] if self.further else command

    @property
    def bootstraps(self) -> str:
        """gRPC addresses of all bootstraps, by commas."""
        return ",".join(f"127.0.0.1:{port}" for port in (self.grpc_port, *self.further))

    def start_worker(self, side: str, name: str, **flags: str) -> Service:
        port = free_port()
        command = [side, "--name", name, "--metrics-port", str(port)]
        if self.hosts is None:
            address = "127.0.0.1"
            command += ["--bootstrap", self.bootstraps]
        else:
            address = self.hosts.add(name)
            command += ["--host", address, "--bootstrap", f"{self.hosts.address}:{self.grpc_port}"]
        return self._start(name, command, f"http://{address}:{port}", {**self.common, **flags})

    def start_both(self, name: str, **flags: str) -> Service:
        """Start a worker that serves both sides, which is two workers to the bootstrap."""
        port = free_port()
        service = self.start_worker("worker", name, prefill_metrics_port=str(port), **flags)
        service.other_side = f"http://127.0.0.1:{port}"
        return service

    def restart(self, name: str) -> Service:
        """Start the same command line again as a supervisor does, which reports the exit that it saw."""
        old = self.services[name]
        if not is_bootstrap(name):
            self.forget(name)
            old.process.wait(STOP_S)
            self.report_exit(name, old.process.pid, old.exit_secret)
        self.services[name] = self._spawn(name, old.command, old.http)
        self.services[name].other_side = old.other_side
        return self.services[name]

    def report_exit(self, name: str, pid: int, secret: bytes) -> str:
        """Report that a worker's process exited, once. Returns the kind of the refusal, or "OK"."""
        names = side_names(name) if self.services[name].other_side else (name,)
        address = "127.0.0.1" if self.hosts is None else self.hosts.address
        with grpc.insecure_channel(f"{address}:{self.grpc_port}") as channel:
            stub = workers_pb2_grpc.WorkerRegistryStub(channel)
            for each in names:
                report = workers_pb2.ReportExitRequest(name=each, pid=pid, secret=secret)
                try:
                    stub.ReportExit(report, timeout=CALL_S)
                except grpc.RpcError as error:
                    return remote_error(error).kind
        return "OK"

    def tokens_used(self) -> float:
        """Return the positions of KV caches that are used, as the bootstraps see them. What was served for
        another bootstrap may be in a worker's last report."""
        services = [service for name, service in self.services.items() if is_bootstrap(name)]
        return sum(
            value
            for service in services
            for (name, labels), value in service.metrics().items()
            if name == "baton_worker_kv_tokens" and ("state", "used") in labels
        )

    def forget(self, name: str) -> None:
        """Do not count the worker's present process as ready any more, since it was or is about to be
        killed."""
        named = (each for each in self.workers() if name in (each["name"], each["process"]))
        self._gone |= {each["incarnation"] for each in named}

    def wait_ready(self, workers: int | None = None, url: str = "") -> None:
        """Wait until the bootstrap reports a successful hand-over and this many ready workers. `url`: of
        another bootstrap than the first."""
        deadline = time.monotonic() + READY_S
        answer = "no answer"
        while time.monotonic() < deadline:
            self._check_alive()
            try:
                reply = web().get(f"{url or self.url}/ready", timeout=5)
                answer = reply.text
                listed = [each for each in reply.json()["workers"] if each["incarnation"] not in self._gone]
                ready = sum(each["state"] == "ready" for each in listed)
                if reply.status_code == 200 and ready >= (workers or 2):
                    return
            except httpx.TransportError as error:
                answer = repr(error)
            time.sleep(POLL_S)
        raise AssertionError(f"not ready: {answer}\n" + self.tails())

    def idle_gauges(self) -> Gauges:
        """Return every gauge, once no service holds a room, and each of several bootstraps has reports of
        that."""
        now = at_rest(self._gauges)
        if self.further and now is not None:
            self.wait_until(lambda: not self.tokens_used(), READY_S, "KV caches are used")
            now = at_rest(self._gauges)
        if now is None:
            raise AssertionError("rooms are held\n" + self.tails())
        return now

    def wait_idle(self, start: Gauges) -> None:
        """Wait until every gauge is back at its value in `start` (`zero-at-idle`). Raises AssertionError with
        those that are not."""
        if different := not_back(self._gauges, start):
            raise AssertionError("not back at their start:\n" + "\n".join(different) + "\n" + self.tails())

    def wait_until(self, holds: Callable[[], Any], limit_s: float, problem: str = "") -> None:
        """Wait until `holds` returns True. Raises AssertionError with `problem` after `limit_s` seconds."""
        give_up = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < give_up, f"{problem}\n{self.tails()}"
            time.sleep(0.01)

    def workers(self) -> list[dict[str, Any]]:
        """Return the workers that the bootstrap lists."""
        listed: list[dict[str, Any]] = web().get(f"{self.url}/ready", timeout=10).json()["workers"]
        return listed

    def _gauges(self) -> dict[str, dict[Sample, float]]:
        """Return gauges by process. A worker's other ranks are `name/1`, `name/2`, and so on."""
        found = {name: service.gauges() for name, service in self.services.items()}
        for name, service in self.services.items():
            if service.other_side:
                found[f"{name}-prefill"] = gauges_of(service.other_side)
            for rank, process in enumerate(service.ranks()[1:], start=1):
                found[f"{name}/{rank}"] = process.gauges()
        return found

    def tails(self) -> str:
        return "\n".join(f"---- {name}\n{service.tail()}" for name, service in self.services.items())

    def stop(self) -> dict[str, int]:
        """Stop workers first, then the bootstrap. Returns exit codes."""
        names = sorted(self.services, key=is_bootstrap)
        return {name: self.services[name].stop() for name in names}

    def _start(self, name: str, command: Sequence[str], http: str, flags: Mapping[str, str]) -> Service:
        given = [part for key, value in flags.items() for part in (f"--{key.replace('_', '-')}", value)]
        self.services[name] = self._spawn(name, [*command, "--model", self.model, *given], http)
        return self.services[name]

    def _spawn(self, name: str, command: Sequence[str], http: str) -> Service:
        starts("stack")
        log = self.folder / f"{name}.log"
        environ = clean_environ() | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.environ}
        starts_worker = not is_bootstrap(name) and "--exit-file" not in command
        secret, given = draw_exit_secret() if starts_worker else (b"", {})
        environ |= given
        with log.open("ab") as sink:
            process: Process
            there = () if self.hosts is None or is_bootstrap(name) else self.hosts.on(name)
            if there or self.by_commands:
                words = [*there, sys.executable, "-m", "baton.cli.main", *command]
                process = subprocess.Popen(words, stdout=sink, stderr=subprocess.STDOUT, env=environ)
            else:
                process = fork_baton(tuple(command), environ, sink.fileno())
        return Service(name, process, log, http, command, exit_secret=secret)

    def _check_alive(self) -> None:
        for name, service in self.services.items():
            if service.process.poll() is not None:
                raise AssertionError(f"{name} exited with {service.process.returncode}\n{service.tail()}")


def is_bootstrap(name: str) -> bool:
    return name.partition("-")[0] == "bootstrap"


@contextmanager
def running_stack(
    model: str,
    *,
    prefill: Sequence[Mapping[str, str]] = ({},),
    decode: Sequence[Mapping[str, str]] = ({},),
    both: Sequence[Mapping[str, str]] = (),
    bootstrap: Mapping[str, str] | None = None,
    bootstraps: int = 1,
    environ: Mapping[str, str] | None = None,
    hosts: Hosts | None = None,
    by_commands: bool = False,
    **common: str,
) -> Iterator[Stack]:
    """A ready stack: one worker per mapping of flags. Whatever happens, its processes end with it.

    Leases are long where `bootstrap` does not say otherwise: many processes share a few cores while files run
    side by side, and a worker that is slow is not gone.
    """
    with tempfile.TemporaryDirectory(prefix="baton-test-") as folder:
        stack = Stack(model, Path(folder), common, environ or {}, hosts=hosts, by_commands=by_commands)
        try:
            common_flags = {"lease_ms": "10000", **(bootstrap or {})}
            stack.further = [free_port() for _ in range(1, bootstraps)]
            stack.start_bootstrap(**common_flags)
            further = stack.start_further_bootstraps(**common_flags)
            for index, flags in enumerate(prefill):
                stack.start_worker("prefill", f"prefill-{index}", **flags)
            for index, flags in enumerate(decode):
                stack.start_worker("decode", f"decode-{index}", **flags)
            for index, flags in enumerate(both):
                stack.start_both(f"worker-{index}", **flags)
            for url in ("", *(each.http for each in further)):
                stack.wait_ready(len(prefill) + len(decode) + 2 * len(both), url)
            if further:
                stack.wait_until(lambda: not stack.tokens_used(), READY_S, "canaries are seen")
            yield stack
        finally:
            for service in stack.services.values():
                if service.process.poll() is None:
                    service.process.send_signal(signal.SIGCONT)
                    service.kill()
