"""Tests of the process that workers on vLLM are forked from."""

import os
import socket
import subprocess
from pathlib import Path

from baton.launch.fork_server import READY, engine_variables
from baton.runtime.child_process import FORK_SERVER, module_command

IMPORT_S = 120.0


def test_workers_can_be_forked_with_vllm_imported() -> None:
    """A fork server that runs several threads behind its imports ends with an error instead."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = module_command(FORK_SERVER, str(theirs.fileno()))
    environ = os.environ | engine_variables("vllm", "cpu")
    with subprocess.Popen(command, env=environ, pass_fds=[theirs.fileno()]) as server:
        theirs.close()
        ours.settimeout(IMPORT_S)
        assert ours.recv(len(READY)) == READY
        maps = Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8")
        assert "site-packages/vllm/_C" in maps, "vLLM's kernels are loaded"
        ours.close()
        assert server.wait(IMPORT_S) == 0
