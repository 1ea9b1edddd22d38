"""How does whoever starts workers have them forked, rather than each import everything?

loading    the process that is forked from imports; whoever wants a worker waits for it
loaded     a worker is forked in some ten milliseconds
gone       it ended: workers start by their commands, until it is back (with back-off)
none       it ended before it was loaded, or the system has no way to it: workers start by their commands
"""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Final

from baton.launch.child import OUTPUT_TIMEOUT_S, Child, Say, Worth, child_environ, describe_exit, start_child
from baton.launch.fork_server import BEGIN, READY, Order
from baton.launch.restart_backoff import Backoff
from baton.runtime.child_process import module_command
from baton.runtime.clock import Clock
from baton.runtime.parent_watch import adopting

NAME: Final = "preloaded"
LOAD_TIMEOUT_S: Final = 120.0
FORK_TIMEOUT_S: Final = 10.0
ANSWER_BYTES: Final = 4096


class ForkServer:
    """One process that has everything imported, kept as long as this is entered."""

    def __init__(
        self,
        environ: Mapping[str, str],
        worth: Worth,
        say: Say,
        clock: Clock,
        loaded: tuple[int, socket.socket] | None = None,
    ) -> None:
        """`environ`: what the libraries of all workers are loaded in. `worth`, `say`: as of a Child.
        `loaded`: the first one, where this process could `split` one off."""
        self._environ = environ
        self._worth = worth
        self._say = say
        self._clock = clock
        self._loaded = loaded
        self._asking = asyncio.Lock()
        self._settled = asyncio.Event()
        """It has been loaded once, or never will be."""
        self._control: socket.socket | None = None
        """Of the one that is loaded."""
        self._process: Child | ForkedProcess | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Forks":
        self._keeper = asyncio.create_task(self._keep(), name="keep the preloaded process")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    @property
    def pid(self) -> int | None:
        """Of the process that workers are forked from now, if there is one."""
        return None if self._control is None or self._process is None else self._process.pid

    async def settled(self) -> None:
        """Returns once it is known whether there is one to fork from: after seconds, at its start."""
        await self._settled.wait()

    async def fork(
        self, name: str, words: tuple[str, ...], environ: Mapping[str, str], worth: Worth, say: Say
    ) -> Child | None:
        """A child that runs `baton WORDS` in `environ`, as `start_child` would start it; None where there is
        nothing to fork from."""
        async with self._asking:
            await self._settled.wait()
            control, process = self._control, self._process
            if control is None or process is None:
                return None
            try:
                async with asyncio.timeout(FORK_TIMEOUT_S):
                    return await _fork(control, name, words, environ, worth, say)
            except BaseException as error:
                # Its answer may come yet, and the next one who asks would take it for its own.
                self._control = None
                process.kill()
                if not isinstance(error, OSError):  # as a TimeoutError is
                    raise
                self._say(
                    f"{name} could not be forked ({error or 'no answer'}): it is started by its command"
                )
                return None

    async def _keep(self) -> None:
        backoff = Backoff()
        while True:
            started_ms = self._clock.now_ms()
            try:
                _check_system()
                loaded = await self._run()
            except (OSError, AttributeError):
                loaded = False
            finally:
                self._settled.set()
            if not loaded:
                return
            wait_ms = backoff.next_ms(self._clock.now_ms() - started_ms)
            await asyncio.sleep(wait_ms / 1000)

    async def _run(self) -> bool:
        """One process, until it has ended. Returns whether it had been loaded. Raises OSError."""
        ours, process = await self._begin()
        with ours:
            self._process = process
            try:
                loaded = await _says_ready(ours)
                if loaded:
                    self._control = ours
                    self._settled.set()
                else:
                    process.kill()
                code = await process.wait()
            finally:
                self._control = None
        self._process = None
        if loaded:
            self._say(f"{NAME} {describe_exit(code)}: workers start without it until it is back")
        return loaded

    async def _begin(self) -> "tuple[socket.socket, Child | Forked]":
        """The one that was split off, or one that has everything yet to import. Raises OSError."""
        if self._loaded is not None:
            (pid, ours), self._loaded = self._loaded, None
            ours.setblocking(False)
            return ours, ForkedProcess(pid)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, ExitStack() as unless_it_starts:
            unless_it_starts.callback(ours.close)
            command = module_command("baton.launch.fork_server", str(theirs.fileno()))
            files = (theirs.fileno(),)
            process = await start_child(NAME, command, self._environ, self._worth, self._say, files)
            unless_it_starts.pop_all()
        return ours, process


def _check_system() -> None:
    """Raises OSError or AttributeError where it lacks what a fork takes, before anything was imported."""
    os.close(os.pidfd_open(os.getpid()))
    os.close(os.memfd_create("order"))
    with adopting():
        pass


async def _says_ready(control: socket.socket) -> bool:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            return await asyncio.get_running_loop().sock_recv(control, ANSWER_BYTES) == READY
    return False


async def _fork(
    control: socket.socket,
    name: str,
    words: tuple[str, ...],
    environ: Mapping[str, str],
    worth: Worth,
    say: Say,
) -> Child:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    with ExitStack() as ours, ExitStack() as theirs:
        order = Order(words, child_environ(environ), os.getpid()).write()
        theirs.callback(os.close, order)
        reads, writes = os.pipe()
        theirs.callback(os.close, writes)
        output = ours.enter_context(os.fdopen(reads, "rb"))
        waits, begins = os.pipe()
        theirs.callback(os.close, waits)
        begin = ours.enter_context(os.fdopen(begins, "wb", buffering=0))
        with adopting():
            socket.send_fds(control, [b"o"], [order, writes, waits])
            answer = await loop.sock_recv(control, ANSWER_BYTES)
        theirs.close()
        pid, _, why = answer.decode().partition(" ")
        if int(pid or 0) == 0:
            raise OSError(why or "the process that it was to be forked from has ended")
        process = ForkedProcess(int(pid))
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), output)
        process.closes_later(transport)
        begin.write(BEGIN)
        begin.close()
        ours.pop_all()
    return Child(name, process, reader, worth, say)


class ForkedProcess:
    """A child that another process forked for this one. As asyncio's own, as far as `Child` asks."""

    def __init__(self, pid: int) -> None:
        """Raises OSError, also where it is no child of this process."""
        self.pid = pid
        self._file = os.pidfd_open(pid)
        try:
            os.waitid(os.P_PIDFD, self._file, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:
            os.close(self._file)
            raise
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._transport: asyncio.BaseTransport | None = None
        self._loop.add_reader(self._file, self._end)

    def closes_later(self, transport: asyncio.BaseTransport) -> None:
        """`transport`: of what it writes. A process that it started may hold the other end for longer."""
        self._transport = transport

    async def wait(self) -> int:
        """Its exit code, < 0 for a signal."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.done():
            signal.pidfd_send_signal(self._file, number)

    def _end(self) -> None:
        self._loop.remove_reader(self._file)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._file)
        self._ended.set_result(os.waitstatus_to_exitcode(status))
        if self._transport is not None:
            self._loop.call_later(2 * OUTPUT_TIMEOUT_S, self._transport.close)
