"""Command `baton serve`: it runs a whole stack on this machine, from start to end."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
from rich.console import Console

from baton.launch.child import Child, describe_exit, start_child
from baton.launch.engine_table import ENGINES, choose_engine
from baton.launch.exit_reports import draw_exit_secret
from baton.launch.fork_server import engine_variables
from baton.launch.fork_server_client import ForkServer
from baton.launch.gpus import VISIBLE, find_gpus
from baton.launch.level_filter import LevelFilter
from baton.launch.model_check import check_models, draft_of
from baton.launch.prepare_model import PROGRESS
from baton.launch.ready_lines import ready_lines
from baton.launch.screen import Screen
from baton.launch.serve_settings import LOOPBACK, ServeSettings, load_serve
from baton.launch.stack_plan import BootstrapPorts, StackCommand, StackPlan, given_admin_address, make_plan
from baton.launch.supervisor import Supervisor
from baton.runtime.child_process import baton_command, module_command
from baton.runtime.clock import SystemClock
from baton.runtime.cpu_affinity import allowed_cpus
from baton.runtime.errors import StartupError
from baton.runtime.listening_ports import bind_port, port_of
from baton.runtime.service_process import StopRequested, run, unless_stopped
from baton.runtime.settings import PREFIX, Flags
from baton.web.client_trust import certificate_problem
from baton.worker.lifecycle.lazy_exit_report import ReportExit, reporter

Command = Callable[[str, Sequence[str]], Sequence[str]]
PREPARE: Final = "prepare"
HTTP_TIMEOUT_S: Final = 2.0
STOP_MARGIN_MS: Final = 5_000
"""Time that a process may take to end beyond its own drain time, in milliseconds."""


def run_serve(flags: Flags, also_known: frozenset[str]) -> int:
    """Run `baton serve`. Return the exit code. Raises StartupError.

    `also_known`: environment variables of other commands, which are not refused as unknown.
    """
    settings = load_serve(flags, os.environ, also_known)
    ports = _free_ports(settings, flags, os.environ)
    plan = make_plan(settings, flags, os.environ, allowed_cpus(), ports, find_gpus(os.environ))
    drafts = {draft_of(part.flag("--speculate") or "") for part in plan.workers} - {""}
    engine = choose_engine(plan.worker_flag("--engine"), plan.worker_flag("--device"))
    missing = ENGINES[engine].missing
    check_models(plan.model, plan.load_format, sorted(drafts), needs_tokenizer=True, missing=missing)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    screen = Screen(Console(), SystemClock())

    async def serve(shutdown: asyncio.Event) -> int:
        fork_server = None
        if any(part.computes for part in plan.workers):
            preloading = environ | engine_variables(
                plan.worker_flag("--engine"), plan.worker_flag("--device")
            )
            fork_server = ForkServer(preloading, LevelFilter(settings.log_level), screen.show, SystemClock())
        stack = ServeStack(settings, plan, environ, screen, fork_server=fork_server)
        return await stack.serve(shutdown)

    return run(serve)


def _free_ports(settings: ServeSettings, flags: Flags, environ: Mapping[str, str]) -> list[BootstrapPorts]:
    """Check that all ports are free, and return the ports of each bootstrap.

    It comes before everything slow. Raises StartupError for a port that is taken, or given twice.
    """
    ports: list[BootstrapPorts] = []
    with ExitStack() as bound:

        def bind(host: str, first: int | None, number: int, flag: str) -> int:
            port = first + number if first else 0
            return port_of(bound.enter_context(bind_port(host, port, flag)))

        bind(settings.host, settings.port, 0, "--port")
        for port in settings.metrics_ports:
            bind(LOOPBACK, port, 0, "--metrics-port")
        for number in range(settings.bootstraps):
            grpc_port = bind(settings.grpc_host, settings.grpc_port, number, "--grpc-port")
            admin_port = None
            if settings.bootstraps > 1:
                admin_port = bind(*given_admin_address(flags, environ), number, "--admin-port")
            ports.append(BootstrapPorts(grpc_port, admin_port))
    return ports


def part_command(word: str, arguments: Sequence[str]) -> Sequence[str]:
    """Return the command line of one process of the stack.

    It is a service, run as a pod would run it, or the preparation of the model.
    """
    if word == PREPARE:
        return module_command("baton.launch.prepare_model", *arguments)
    return baton_command(word, *arguments)


class ServeStack:
    """One run of `baton serve`: the stack's processes, from the model's preparation to their end."""

    def __init__(
        self,
        settings: ServeSettings,
        plan: StackPlan,
        environ: Mapping[str, str],
        screen: Screen,
        command: Command = part_command,
        report_exit: ReportExit | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Describe the stack to run.

        `fork_server`: server from which workers are forked. Without one, workers start by their command
        lines.
        """
        self._settings = settings
        self._plan = plan
        self._command = command
        self._report_exit = report_exit or reporter(plan.bootstrap_addresses, plan.tls, plan.run_token)
        self._environ = environ
        self._screen = screen
        self._fork_server = fork_server
        self._exit_files = Path()
        """Folder of the workers' exit files. With such a file a worker's launcher reports the exits that an
        earlier launcher left behind."""

    async def serve(self, shutdown: asyncio.Event) -> int:
        """Run the stack until `shutdown` is set. Return the exit code. Raises StartupError."""
        with TemporaryDirectory(prefix="baton-exits-") as folder:
            self._exit_files = Path(folder)
            async with self._fork_server or nullcontext():  # it imports while the model is prepared
                return await self._serve(shutdown)

    async def _serve(self, shutdown: asyncio.Event) -> int:
        try:
            await self._prepare_model(shutdown)
        except StopRequested:
            return 0
        supervisor = Supervisor(self.start_part, self._report_exit, self._screen.show, SystemClock())
        try:
            await self._start(supervisor, shutdown)
            await supervisor.keep(shutdown)
        except StopRequested:
            pass
        except BaseException:
            await self._stop(supervisor, STOP_MARGIN_MS)
            raise
        with self._screen.step("stopping: requests that started may finish; Ctrl-C again ends at once"):
            is_clean = await self._stop(supervisor, self._plan.drain_timeout_ms + STOP_MARGIN_MS)
        return 0 if is_clean else 1

    async def _start(self, supervisor: Supervisor, shutdown: asyncio.Event) -> None:
        plan, timeout_ms = self._plan, self._settings.ready_timeout_ms
        verify = True if plan.http_tls is None else plan.http_tls.pinned()
        headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
        async with httpx.AsyncClient(
            base_url=plan.url, timeout=HTTP_TIMEOUT_S, trust_env=False, verify=verify, headers=headers
        ) as http:

            async def all_answer(path: str) -> bool:
                urls = plan.admin_urls or ("",)
                return all([await answers(f"{url}{path}") for url in urls])

            async def answers(path: str) -> bool:
                try:
                    return (await http.get(path)).is_success
                except httpx.ConnectError as error:
                    problem = certificate_problem(error, plan.url, "its files are those in --tls-dir")
                    if problem:  # for example an expired one, which no wait mends
                        raise StartupError(problem) from None
                    return False
                except httpx.TransportError:
                    return False

            count = len(plan.bootstraps)
            with self._screen.step(f"starting {_bootstraps(count)} on {plan.url}"):
                await supervisor.start(plan.bootstraps, lambda: all_answer("/health"), timeout_ms, shutdown)
            with self._screen.step(f"starting {', '.join(_described(part) for part in plan.workers)}"):
                if self._fork_server is not None:
                    await unless_stopped(shutdown, self._fork_server.settled())
                await supervisor.start(plan.workers, lambda: all_answer("/ready"), timeout_ms, shutdown)
            card = await _model_card(http)
        for line in ready_lines(
            plan.url,
            str(card.get("id") or Path(plan.model).name),
            self._settings.tls_dir,
            needs_key=bool(plan.api_key),
            has_admin_port=plan.bootstrap.flag("--admin-port") is not None,
            admin_urls=plan.admin_urls,
            operators=plan.operators,
            sampling=card.get("default_sampling_params") or {},
            metrics=[page for part in plan.workers for page in _metrics_pages(part)],
        ):
            self._screen.show(line)

    async def _stop(self, supervisor: Supervisor, timeout_ms: int) -> bool:
        """Stop the bootstraps, so that workers get no new requests, and then the workers. Return whether none
        was killed."""
        return await supervisor.stop([self._plan.bootstraps, self._plan.workers], timeout_ms)

    async def start_part(self, part: StackCommand) -> Child:
        """Start one process of the stack. A process that loads the model gets a secret for the report of its
        exit."""
        secret, given = draw_exit_secret() if part.computes else (b"", {})
        child = await self._start_process(part, {**self._environ, **part.environ, **given})
        child.exit_secret = secret
        return child

    async def _start_process(self, part: StackCommand, environ: Mapping[str, str]) -> Child:
        is_shown, show = LevelFilter(self._settings.log_level), self._screen.show
        if self._fork_server is not None and part.computes:
            words = (part.role, *part.flags)
            child = await self._fork_server.fork(part.name, words, environ, is_shown, show)
            if child is not None:
                return child
        flags = part.flags
        if part.registers_as and not part.computes:
            flags = (*flags, "--exit-file", str(self._exit_files / part.name))
        return await start_child(part.name, self._command(part.role, flags), environ, is_shown, show)

    async def _prepare_model(self, shutdown: asyncio.Event) -> None:
        """Prepare the model in a process of its own, because that loads the tensor library."""
        with self._screen.step(f"preparing the model {self._plan.model}") as progress:

            def show(line: str) -> None:
                text = line.removeprefix("model: ")
                write = progress if text.startswith(PROGRESS) else self._screen.show
                write(text.removeprefix(PROGRESS))

            child = await start_child(
                "model",
                self._command(PREPARE, (self._plan.model, self._plan.load_format)),
                self._environ,
                lambda line: line.startswith(PROGRESS),
                show,
            )
            try:
                code = await unless_stopped(shutdown, child.wait())
            except StopRequested:
                child.kill()
                await child.wait()
                raise
            if code != 0:
                reason = child.startup_error()
                if reason is None:
                    child.show_hidden_lines()
                raise StartupError(reason or f"preparing the model {self._plan.model} {describe_exit(code)}")


async def _model_card(http: httpx.AsyncClient) -> Mapping[str, Any]:
    """Return the model's entry in `/v1/models`, or an empty mapping if it cannot be read.

    That happens for example if the API keys have changed by now.
    """
    try:
        card: Mapping[str, Any] = (await http.get("/v1/models")).json()["data"][0]
    except (httpx.TransportError, ValueError, KeyError, IndexError, TypeError):
        return {}
    return card


def _bootstraps(count: int) -> str:
    return "the bootstrap" if count == 1 else f"{count} bootstraps"


def _described(part: StackCommand) -> str:
    gpus = f" and GPU {part.environ[VISIBLE]}" if VISIBLE in part.environ else ""
    return f"{part.name} on cores {part.flag('--cpus')}{gpus}"


def _metrics_pages(part: StackCommand) -> list[str]:
    """Return the metrics URL of each side of a worker, with its name, if the port was given."""
    ports = {"": part.flag("--metrics-port"), "'s prefill side": part.flag("--prefill-metrics-port")}
    return [f"{part.name}{side} http://{LOOPBACK}:{port}/metrics" for side, port in ports.items() if port]
