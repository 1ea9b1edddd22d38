"""Tests that NIXL listens on the ports of the manifests."""

import subprocess
import sys

from tests.deploy.chart import CASES, pods
from tests.deploy.flags import variables

LISTENS = """
import os
from baton.ids import Incarnation
from baton.transfer.transfer_protocol import Region
from baton.transfer.nixl import NixlTransfer
from baton.runtime.host_memory import HostMemory

memory = HostMemory(1 << 16)
transfer = NixlTransfer(Incarnation(7))
transfer.register(Region("kv", memory.address, memory.length))
transfer.endpoint()
mine = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
sockets = {os.readlink(link) for link in mine if os.path.lexists(link)}
for family in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{family}").readlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
            print("listens", int(words[1].rpartition(":")[2], 16))
transfer.close()
"""


def test_a_worker_receives_at_no_other_ports_than_the_pods_policy_names() -> None:
    told = {
        variables(pod)["UCX_TCP_PORT_RANGE"]
        for case in CASES
        for pod in pods(case)
        if pod.component != "bootstrap"
    }
    assert told == {"9500-9563"}
    done = subprocess.run(
        [sys.executable, "-c", LISTENS],
        env={"UCX_TCP_PORT_RANGE": "9500-9563", "UCX_TLS": "tcp", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    listens = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("listens ")]
    assert listens, done.stderr
    assert all(9500 <= port <= 9563 for port in listens), listens
