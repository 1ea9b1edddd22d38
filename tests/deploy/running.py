"""Rendered pods as processes of this machine.

Its own flags and variables, its probes asked over HTTP.

What Kubernetes would put in is put in here: addresses, names, the files of Secrets. Ports are the chart's.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from tests.deploy.chart import Pod

START_S: Final = 300.0
STOP_S: Final = 60.0
POLL_S: Final = 0.1

MAIN: Final = """
import os, socket, sys
writable = tuple(os.environ.pop("WRITABLE").split(":"))
name, *addresses = os.environ.pop("NAME").split(",")
look_up = socket.getaddrinfo
def getaddrinfo(host, port, *args, **kwargs):
    hosts = addresses if host == name else [host]
    return [found for each in hosts for found in look_up(each, port, *args, **kwargs)]
socket.getaddrinfo = getaddrinfo
def watch(event, arguments):
    if event == "open":
        path, flags = arguments[0], arguments[2]
        writes = isinstance(path, str) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    else:
        path, writes = arguments[0] if arguments else "", event in ("os.mkdir", "os.rename", "os.symlink")
    if writes and not os.path.abspath(os.fsdecode(path)).startswith(writable):
        print("WROTE", path, file=sys.stderr, flush=True)
sys.addaudithook(watch)
sys.argv[0] = "baton"
from baton.cli.main import main
main()
"""
"""Baton, told on of each file that Python code opens for writing elsewhere than where its pod may write.

`NAME` is a host name and its addresses, as a cluster's name server has them for a headless Service."""


@dataclass
class Running:
    pod: Pod
    process: subprocess.Popen[bytes]
    log: Path
    http: httpx.Client
    address: str = "127.0.0.1"
    """Address of the pod."""

    def port(self, name: str) -> int:
        [port] = [each["containerPort"] for each in self.pod.main["ports"] if each["name"] == name]
        assert isinstance(port, int)
        return port

    def probe(self, name: str) -> int:
        """Return the HTTP status that the kubelet would get; 0 for no answer."""
        asked = self.pod.main[name]["httpGet"]
        scheme, port = asked.get("scheme", "HTTP").lower(), self.port(asked["port"])
        try:
            return self.http.get(f"{scheme}://{self.address}:{port}{asked['path']}").status_code
        except httpx.TransportError:
            return 0

    def wait(self, probe: str) -> None:
        deadline = time.monotonic() + START_S
        while self.probe(probe) != 200:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, f"{self.pod.owner}: no {probe}\n{self.said()}"
            time.sleep(POLL_S)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(STOP_S)


def run(
    pod: Pod,
    folder: Path,
    replaced: Mapping[str, str],
    packages: Path | None = None,
    *,
    address: str = "127.0.0.1",
    name: Sequence[str] = (),
) -> Running:
    """Start the pod's one container. `replaced`: what stands in its flags for what only a cluster has.
    `packages`: all that it may import, if not this interpreter's. `address`: where it listens. `name`: a host
    name, and its addresses."""
    home, log = folder / "home", folder / "log"
    home.mkdir(parents=True)
    arguments = list(pod.main["args"])
    own = {"0.0.0.0": address, "$(POD_IP)": address, "/home/baton": str(home)}
    for old, new in {**replaced, **own}.items():
        arguments = [each.replace(old, new) for each in arguments]
    told = {each["name"]: each.get("value", "") for each in pod.main["env"]}
    python = [sys.executable] if packages is None else [sys.executable, "-S"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*python, "-c", MAIN, *arguments],
            env={
                **told,
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                "PATH": os.environ["PATH"],
                **({} if packages is None else {"PYTHONPATH": str(packages)}),
                "NAME": ",".join(name),
                "HOME": str(home),
                "WRITABLE": f"{home}:/tmp/:/dev/",
            },
            cwd=home,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Running(pod, process, log, httpx.Client(verify=False, trust_env=False, timeout=5), address)
