"""The stack that a benchmark measures: a running one, or one started for the benchmark."""

import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from baton.runtime.child_process import child_environ, module_command
from baton.runtime.listening_ports import port_of, reserve_port
from bench.serving.system import System, SystemSpec

HOST: Final = "127.0.0.1"


@contextmanager
def running(url: str, flags: str) -> Iterator[str]:
    """Yield the stack's base URL. `flags`: flags of `baton serve`, used without a `url`. Raises
    SystemFailed."""
    if url:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, reserve_port(HOST) as reserved:
        address = f"http://{HOST}:{port_of(reserved)}"
        command = module_command("baton.cli.main", "serve", "--port", str(port_of(reserved)))
        spec = SystemSpec(
            name="baton serve",
            url=address,
            start=(*command, "--grpc-port", "0", *shlex.split(flags)),
            ready=(f"{address}/ready",),
        )
        system = System(spec, Path(folder) / "log", Path.cwd(), child_environ(os.environ))
        try:
            system.start()
            yield address
        finally:
            system.end()
