"""Processes of one worker's ranks on this machine: their start, their common end, and their restart.

    starting   a rank that ends before turns go on is fatal. Its reason becomes this process's.
    running    a rank that ends takes the others with it. They get time to write why, then they are killed.
               Once all have ended, the exit is reported, and the group starts again after a back-off.
    stopping   the leader gets SIGTERM, and all ranks leave when their rooms have ended.

A worker on several machines has a launcher on each. No launcher knows when the ranks of the others have
ended. So a launcher whose rank ends stops its own ranks and ends, and the platform starts all of them again.
"""

import asyncio
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Final

import httpx

from baton.launch.child import Child, start_child
from baton.launch.core_shares import deal_cores
from baton.launch.exit_reports import (
    draw_exit_secret,
    report_exit_repeatedly,
    wait,
)
from baton.launch.fork_server import engine_variables, fork_own_server, worker_modules
from baton.launch.fork_server_client import ForkServer
from baton.launch.level_filter import LINE_START
from baton.launch.rank_exits import GroupExit, collect, failure_of
from baton.launch.restart_backoff import Backoff
from baton.launch.shape_check import check_shape
from baton.runtime.child_process import baton_command
from baton.runtime.clock import Clock, SystemClock
from baton.runtime.cpu_affinity import allowed_cpus
from baton.runtime.errors import EXIT_FAILED, StartupError
from baton.runtime.exit_file import ExitFile, ExitRecord
from baton.runtime.listening_ports import port_of, reserve_port
from baton.runtime.logging import Log
from baton.runtime.service_process import run, unless_stopped
from baton.runtime.setting_kinds import join_address
from baton.runtime.settings import PREFIX, to_environ, to_flags
from baton.runtime.worker_settings import WILDCARDS, WorkerSettings
from baton.worker.lifecycle.lazy_exit_report import ReportExit, reporter

log = Log(__name__)

LOOPBACK: Final = "127.0.0.1"
LEAVING_S: Final = 10.0
"""Seconds that the other ranks get after one has left in order. In that time the leader ends its
registration."""
STOP_MARGIN_S: Final = 3.0
POLL_S: Final = 0.25
HTTP_TIMEOUT_S: Final = 2.0

Command = Callable[[WorkerSettings], Sequence[str]]


def run_ranks(
    settings: WorkerSettings, environ: Mapping[str, str], serve_forks: Callable[[socket.socket], None]
) -> int:
    """Run a worker of several ranks until a stop signal. Return the exit code. Raises StartupError.

    `serve_forks`: function that runs the fork server, in a process forked from this one.
    """
    check_shape(settings)
    has_several = len(settings.ranks_here) > 1
    modules = worker_modules(settings.engine, settings.device)
    loaded = fork_own_server(serve_forks, modules) if has_several else None

    async def serve(shutdown: asyncio.Event) -> int:
        report_exit = reporter(settings.bootstrap, settings.tls, settings.run_token)
        if not has_several:
            return await RankProcesses(settings, environ, report_exit, SystemClock()).serve(shutdown)
        own = without_settings(environ) | engine_variables(settings.engine, settings.device)
        async with ForkServer(own, lambda _: False, _log_fallback, SystemClock(), loaded) as fork_server:
            await unless_stopped(shutdown, fork_server.settled())
            ranks = RankProcesses(settings, environ, report_exit, SystemClock(), fork_server=fork_server)
            return await ranks.serve(shutdown)

    return run(serve)


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the launcher's `BATON_*` settings, because each rank gets its own."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX)}


def _log_fallback(why: str) -> None:
    log.warning("ranks start by their commands", why=why)


def rank_command(settings: WorkerSettings) -> Sequence[str]:
    """Return the command line that runs the rank with these settings."""
    return baton_command(settings.role, *to_flags(settings))


class RankProcesses:
    """Processes of one worker's ranks, which are restarted together. Used by one task."""

    def __init__(
        self,
        settings: WorkerSettings,
        environ: Mapping[str, str],
        report_exit: ReportExit,
        clock: Clock,
        command: Command = rank_command,
        backoff: Backoff | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Describe the ranks to run.

        `fork_server`: server from which ranks are forked. Without one, ranks start by their command lines.
        """
        self._settings = settings
        self._environ = without_settings(environ) | to_environ(settings)
        self._report_exit = report_exit
        self._clock = clock
        self._command = command
        self._backoff = Backoff() if backoff is None else backoff
        self._fork_server = fork_server
        self._had_started = False

    async def serve(self, shutdown: asyncio.Event) -> int:
        """Run the ranks, and restart them together when they end, until `shutdown` is set. Return the exit
        code.

        Raises StartupError if they do not come up the first time.
        """
        with ExitStack() as reserved:
            file = await self._exit_file(reserved)
            # The system gives these ports to no other program, while ranks that know them may listen there.
            host, port = self._settings.host, self._settings.metrics_port
            metrics_port = port_of(reserved.enter_context(reserve_port(host, port, "--metrics-port")))
            rendezvous = self._settings.rendezvous or join_address(
                LOOPBACK, port_of(reserved.enter_context(reserve_port(LOOPBACK)))
            )
            ranks = self._rank_settings(rendezvous, metrics_port)
            while True:
                started_ms = self._clock.now_ms()
                ended = await self._run_once(ranks, metrics_port, shutdown, file)
                if ended.is_orderly or (shutdown.is_set() and not ended.started):
                    return 0
                if shutdown.is_set():
                    log.warning("the group did not leave in order", cause=ended.cause)
                    return EXIT_FAILED
                if not self._had_started or self._settings.machines > 1:
                    raise failure_of(ended)
                wait_ms = self._backoff.next_ms(self._clock.now_ms() - started_ms)
                reason = ended.first.startup_error()
                log.error(
                    "the group ended: starting it again", why=ended.cause, cause=reason, wait_ms=wait_ms
                )
                await wait(shutdown, wait_ms / 1000)
                if shutdown.is_set():
                    return 0

    async def _exit_file(self, reserved: ExitStack) -> ExitFile | None:
        """Lock the worker's exit file, if it has one, and report the exits recorded in it."""
        if not self._settings.exit_file:
            return None
        from baton.worker.lifecycle.exit_reporter import report_previous  # loads gRPC

        file = reserved.enter_context(await asyncio.to_thread(ExitFile, self._settings.exit_file))
        reporting = asyncio.create_task(report_previous(file, self._report_exit))
        reserved.callback(reporting.cancel)
        return file

    def _rank_settings(self, rendezvous: str, metrics_port: int) -> list[WorkerSettings]:
        """Return the settings of each rank that is started on this machine.

        The cores are divided among the ranks. Only the first rank listens on the ports that were given.
        """
        settings, here = self._settings, self._settings.ranks_here
        shares = deal_cores(settings.cpus or allowed_cpus(), len(here))
        return [
            replace(
                settings,
                rank=rank,
                rendezvous=rendezvous,
                machines=1,
                machine=None,
                cpus=cpus,
                metrics_port=metrics_port if rank == here[0] else 0,
                grpc_port=settings.grpc_port if rank == 0 else 0,
            )
            for rank, cpus in zip(here, shares, strict=True)
        ]

    async def _run_once(
        self,
        ranks: Sequence[WorkerSettings],
        metrics_port: int,
        shutdown: asyncio.Event,
        file: ExitFile | None,
    ) -> GroupExit:
        """Start the ranks as one incarnation, and return when all of them were seen to exit."""
        secret, given = self._own_exit()
        children = [await self._start(each, given) for each in ranks]
        record = ExitRecord(self._settings.name, children[0].pid, secret)
        if file is not None:
            _update(lambda: file.leave([record]))
        exits = {asyncio.create_task(child.wait()): child for child in children}
        stop = asyncio.create_task(shutdown.wait())
        started = asyncio.create_task(self._wait_for_start(metrics_port))
        codes: dict[Child, int] = {}
        await asyncio.wait({stop, *exits}, return_when=asyncio.FIRST_COMPLETED)
        # Only ranks that have started by now leave on the signal below. Other ranks have no rooms to finish.
        came_up = started.done()
        left_s = LEAVING_S
        if shutdown.is_set():
            left_s = self._settings.drain_timeout_ms / 1000 + STOP_MARGIN_S if came_up else 0.0
            children[0].terminate()
        await collect(exits, codes, left_s)
        killed = [child for child in children if child not in codes]
        for child in killed:
            log.warning("killing a rank that has not ended", which=child.name, pid=child.pid)
            child.kill()
        await collect(exits, codes, None)
        ended = GroupExit(codes, frozenset(killed), came_up)
        stop.cancel()
        started.cancel()
        self._had_started |= ended.started
        if self._had_started and not ended.is_orderly and self._settings.machines == 1:
            await self._report(record, file, shutdown)
        return ended

    async def _report(self, record: ExitRecord, file: ExitFile | None, shutdown: asyncio.Event) -> None:
        """Report to the bootstrap that all ranks have ended, which proves that they write to no peer any
        more."""
        reason = await report_exit_repeatedly(
            self._report_exit, record.name, record.pid, record.secret, shutdown
        )
        if reason is not None:
            log.warning("the bootstrap could not be told that the group ended", cause=reason)
            if file is not None:
                _update(lambda: file.retain(record))

    def _own_exit(self) -> tuple[bytes, Mapping[str, str]]:
        """Return a secret and the environment variables that give its digest to the next incarnation.

        By the secret this launcher proves to the bootstrap that a report of their exit is its own.

        With several machines there is no secret. This launcher does not know when the other ranks have ended.
        """
        return draw_exit_secret() if self._settings.machines == 1 else (b"", {})

    async def _start(self, settings: WorkerSettings, given: Mapping[str, str]) -> Child:
        """Start the process of one rank. `given`: environment variables for the ranks of this incarnation, in
        addition to the launcher's."""
        name, environ = f"rank {settings.rank}", {**self._environ, **given}

        def show(line: str) -> None:
            """Write a rank's line to stderr. A log line names its rank already, so it gets no prefix."""
            own = line.removeprefix(f"{name}: ")
            with suppress(OSError):  # for example a full disk: ranks would stop if their pipe were not read
                sys.stderr.write(f"{own if LINE_START.match(own) else line}\n")
                sys.stderr.flush()

        if self._fork_server is not None:
            words = (settings.role, *to_flags(settings))
            child = await self._fork_server.fork(name, words, environ, lambda _: True, show)
            if child is not None:
                return child
        return await start_child(name, self._command(settings), environ, lambda _: True, show)

    async def _wait_for_start(self, metrics_port: int) -> None:
        """Return once the first rank on this machine has started, as its `/started` says.

        `/ready` would come too late. The rank learns that it is ready when it renews its lease. By then rooms
        may have come long ago.
        """
        host = LOOPBACK if self._settings.host in WILDCARDS else self._settings.host
        url = f"http://{join_address(host, metrics_port)}/started"
        async with httpx.AsyncClient(timeout=HTTP_TIMEOUT_S, trust_env=False) as http:
            while True:
                with suppress(httpx.TransportError):
                    if (await http.get(url)).is_success:
                        return
                await asyncio.sleep(POLL_S)


def _update(write: Callable[[], None]) -> None:
    """Write to the exit file by calling `write`. If that fails, the ranks go on.

    The next launcher then reports no exit.
    """
    try:
        write()
    except StartupError as error:
        log.warning("the exit of these ranks will not be reported by another launcher", cause=str(error))
