"""Server process from which workers are forked, each with all libraries imported.

    python -m baton.cli.forked_commands SOCKET

The server sends READY on the socket, a descriptor that it inherits. It then forks a worker for each request:

    request   three open files: the order (`ForkOrder`), the worker's output, and a pipe.
    reply     the worker's process id, or 0 and the reason why there is none.

The worker becomes a child of the process that requested it (`parent_watch.adopting_orphans`). That process
waits for the worker as for any child, and the kernel kills the worker when that process ends. The worker
begins at the pipe's first byte. It exits if the pipe is closed instead, so that no worker runs unknown to its
parent.

The standard library's fork server cannot replace this one. Its processes are the server's children: when the
server is killed, they count as ended with code 255 while they still run. Here an exit is the proof that a
worker writes to no peer any more.

A worker of several ranks forks a server from itself (`fork_own_server`), which imports nothing again.

A fork keeps only the calling thread. So the server has one thread, and calls neither gRPC, CUDA nor OpenMP.
"""

import errno
import gc
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

from baton.launch.engine_table import engine_module
from baton.launch.process_title import set_process_title
from baton.runtime.child_process import FORK_SERVER, baton_command, module_command
from baton.runtime.environment_check import clean_environment
from baton.runtime.parent_watch import die_with_parent
from baton.runtime.settings import PREFIX

READY: Final = b"ready"
BEGIN: Final = b"b"
ENGINE_VARIABLES: Final = (f"{PREFIX}ENGINE", f"{PREFIX}DEVICE")
"""Environment variables that tell a fork server which engine to import."""
FILES: Final = 3
PID_BYTES: Final = 32
THREADS: Final = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """Order to fork one worker: its command, environment and parent process."""

    words: tuple[str, ...]
    """Arguments of the command `baton` that the worker runs."""
    environ: dict[str, str]
    """Complete environment of the worker."""
    parent: int
    """Process id of the worker's parent."""

    @property
    def command(self) -> tuple[str, ...]:
        """Command line that would start the same worker without a fork server."""
        return baton_command(*self.words)

    def write(self) -> int:
        """Write the order to a new memory file, and return its descriptor. Raises OSError."""
        file = os.memfd_create("order")
        os.write(file, json.dumps(asdict(self)).encode())
        return file

    @classmethod
    def read(cls, file: int) -> "ForkOrder":
        """Return the order that the open file `file` contains."""
        order = json.loads(Path(f"/proc/self/fd/{file}").read_bytes())
        return cls(tuple(order["words"]), order["environ"], order["parent"])


def worker_modules(engine: str = "auto", device: str = "auto") -> tuple[str, ...]:
    """Return the modules of a worker that take long to import. `engine`, `device`: values of its settings."""
    return "baton.both.wiring", engine_module(engine, device)


def engine_variables(engine: str, device: str) -> dict[str, str]:
    """Return the environment variables for a fork server of workers with these settings."""
    return dict(zip(ENGINE_VARIABLES, (engine, device), strict=True))


def serve_forks(control: socket.socket, program: str, modules: Sequence[str] | None = None) -> bool:
    """Import `modules`, and fork a worker for each request on `control`, until it is closed.

    Return True in a forked worker, which has to run its command now. Return False in the server when no
    process can send requests any more. `program`: path of the command's program, for the worker's `sys.argv`.
    `modules`: if None, those of a worker with the engine that the environment names.
    """
    _import_all(modules or worker_modules(*(os.environ.get(name, "auto") for name in ENGINE_VARIABLES)))
    control.send(READY)
    while True:
        message, files, _, _ = socket.recv_fds(control, 1, FILES)
        if not message:
            return False
        order, output, begin = files
        worker = _fork_grandchild()
        if worker == 0:
            control.close()
            _become(order, output, begin, program)
            return True
        for file in files:
            os.close(file)
        control.send(f"{max(worker, 0)} {os.strerror(-worker) if worker < 0 else ''}".encode())


def fork_own_server(
    serve: Callable[[socket.socket], None], modules: Sequence[str]
) -> tuple[int, socket.socket] | None:
    """Fork a fork server from this process, which ends together with this process.

    Return its process id and the socket for requests. Return None if this process has not imported all
    `modules`, has several threads, or cannot be forked. `serve`: function that the server runs, with its
    socket.
    """
    if not sys.modules.keys() >= set(modules) or _thread_count() > 1:
        return None
    parent = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = _fork_or_error()
    if pid != 0:
        theirs.close()
        return (pid, ours) if pid > 0 else None
    ours.close()
    die_with_parent(parent)
    os.setsid()
    set_process_title(module_command(FORK_SERVER, str(theirs.fileno())))
    serve(theirs)
    sys.exit(0)


def _import_all(modules: Sequence[str]) -> None:
    """Import `modules` without starting the compute threads of a library."""
    clean_environment(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.disable()
    for each in modules:
        import_module(each)
    gc.collect()
    gc.freeze()  # the collector would write to these objects, and their pages would no longer be shared
    threads = _thread_count()
    if threads > 1:
        sys.exit(f"{threads} threads run after the imports: no worker is forked from here")


def _thread_count() -> int:
    return len(list(THREADS.iterdir()))


def _fork_grandchild() -> int:
    """Fork a process whose parent, a process in between, ends at once, so that it is adopted.

    Return its process id in this process, and 0 in the new one. A negative result is minus an errno.
    """
    reads, writes = os.pipe()
    between = _fork_or_error()
    if between == 0:
        worker = _fork_or_error()
        if worker != 0:
            os.write(writes, str(worker).encode())
            os._exit(0)
        os.close(reads)
        os.close(writes)
        return 0
    os.close(writes)
    worker = between if between < 0 else int(os.read(reads, PID_BYTES) or -errno.ECHILD)
    os.close(reads)
    if between > 0:
        os.waitpid(between, 0)
    return worker


def _fork_or_error() -> int:
    """Fork like `os.fork`, but return minus the errno if that fails."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)


def _become(file: int, output: int, begin: int, program: str) -> None:
    """Turn this forked process into the ordered worker, once its parent allows it.

    It takes the session, output, environment and arguments that a process started by `child.start_child` has.
    """
    if os.read(begin, 1) != BEGIN:
        os._exit(1)
    order = ForkOrder.read(file)
    die_with_parent(order.parent)
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    for each in (file, output, begin):
        os.close(each)
    os.environ.clear()
    os.environ.update(order.environ)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        # Another build of the library has called CUDA at its import: the worker starts anew.
        os.execv(order.command[0], order.command)  # noqa: S606
    sys.argv[:] = [program, *order.words]
    set_process_title(order.command)
    gc.enable()
