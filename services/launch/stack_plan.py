"""Plan of a stack on one machine: the command line of each process, as a pod would run it."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, TypeAlias, TypeVar

from baton.bootstrap.settings import BootstrapSettings
from baton.both.settings import BothSettings, side_names
from baton.decode.settings import DecodeSettings
from baton.launch.core_shares import Cores, cut_cores, share_cores
from baton.launch.gpus import VISIBLE, Gpus, deal_gpus
from baton.launch.serve_settings import (
    LOOPBACK,
    ServeSettings,
    grpc_certificate,
    https_certificate,
    passed_on,
)
from baton.prefill.settings import PrefillSettings
from baton.runtime.reachability import local_address_of
from baton.runtime.setting_kinds import join_address
from baton.runtime.settings import PREFIX, Flags, load, settings_of, to_environ, to_flags
from baton.runtime.tls_files import TlsFiles
from baton.runtime.worker_settings import WILDCARDS
from baton.web.api_keys import first_key, has_several_keys

Service = TypeVar("Service", BootstrapSettings, PrefillSettings, DecodeSettings, BothSettings)
Worker = TypeVar("Worker", PrefillSettings, DecodeSettings, BothSettings)
AnyWorker: TypeAlias = PrefillSettings | DecodeSettings | BothSettings
RUN_TOKEN: Final = f"{PREFIX}RUN_TOKEN"
REASONING_KEY: Final = f"{PREFIX}REASONING_KEY"
"""Variable with the key of event ids. A bootstrap that is restarted gets the same one."""
TOKEN_BYTES: Final = 32
ON_GPUS: Final = ("auto", "cuda")
"""Values of `--device` for which the stack's plan gives GPUs to the worker."""


class Operators(Enum):
    """Which callers may read the pages for operators."""

    CALLERS = "every caller of their port"
    ADMINS = "admin keys"
    NOBODY = "no caller"


@dataclass(frozen=True, slots=True)
class StackCommand:
    """Command line of one process of the stack: a service, or a launcher of a worker's ranks."""

    role: str
    """Name of the `baton` command that the process runs: bootstrap, prefill, decode or worker."""
    name: str
    flags: tuple[str, ...]
    """Flags of the command and their values, alternating."""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables with the process's settings that have no flag, or are secrets and may not appear
    in a command line."""
    computes: bool = False
    """Whether the process loads the model itself. A launcher and the bootstrap do not."""

    @property
    def registers_as(self) -> tuple[str, ...]:
        """Names of workers under which the process registers at the bootstrap: none, its own, or one for each
        side."""
        match self.role:
            case BootstrapSettings.role:
                return ()
            case BothSettings.role:
                return side_names(self.name)
        return (self.name,)

    def flag(self, name: str) -> str | None:
        """Return the value of the flag called `name`, or None if it is not given."""
        return dict(zip(self.flags[::2], self.flags[1::2], strict=True)).get(name)


class BootstrapPorts(NamedTuple):
    """Ports of one bootstrap that no other bootstrap of the stack has."""

    grpc: int
    admin: int | None = None
    """Port of the pages for operators. None to leave it to the user's settings, if there is one bootstrap."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Processes of a stack to start: the bootstraps, then the workers. They stop in the same order."""

    bootstraps: tuple[StackCommand, ...]
    workers: tuple[StackCommand, ...]
    bootstrap_addresses: tuple[str, ...]
    """Addresses at which workers register, each as host:port."""
    url: str
    """URL of the HTTP API for programs on this machine. All bootstraps share it."""
    model: str
    load_format: str
    drain_timeout_ms: int
    tls: TlsFiles | None
    """Certificate with which `baton serve` itself calls the bootstrap over gRPC, or None."""
    http_tls: TlsFiles | None
    api_key: str = field(repr=False)
    """One of the HTTP API's keys. Empty if the API asks for none."""
    operators: Operators
    run_token: str = field(repr=False)
    """Token by which the stack's processes recognize each other. Empty if they use certificates."""

    @property
    def admin_urls(self) -> list[str]:
        """URL of each bootstrap's pages for operators, if there are several bootstraps."""
        if len(self.bootstraps) == 1:
            return []
        scheme, host = self.url.partition("://")[0], self.bootstrap.flag("--admin-host") or LOOPBACK
        ports = [int(each.flag("--admin-port") or 0) for each in self.bootstraps]
        return [f"{scheme}://{join_address(local_address_of(host), port)}" for port in ports]

    @property
    def bootstrap(self) -> StackCommand:
        """The first bootstrap. The others differ from it in their ports."""
        return self.bootstraps[0]

    def worker_flag(self, name: str) -> str:
        """Return the value of a flag of the workers, or "auto" if it is not given."""
        return next(filter(None, (part.flag(name) for part in self.workers)), "auto")


def make_plan(
    serve: ServeSettings,
    flags: Flags,
    environ: Mapping[str, str],
    cores: Sequence[int],
    ports: Sequence[BootstrapPorts],
    gpus: Gpus = (),
) -> StackPlan:
    """Return the plan of a stack. Raises SettingsError.

    `cores` and `gpus` are divided among the workers. `ports`: ports of each bootstrap, never 0.
    """
    if not serve.tls_dir:
        environ = {RUN_TOKEN: secrets.token_urlsafe(TOKEN_BYTES), **environ}
    reachable = LOOPBACK if serve.host in WILDCARDS else serve.host
    grpc_host = reachable if serve.tls_dir else LOOPBACK
    addresses = tuple(join_address(grpc_host, each.grpc) for each in ports)
    # Parts log at least what led to a failure. The screen shows the lines that `--log-level` selects.
    level = {"log_level": "debug" if serve.log_level == "debug" else "info"}
    siblings = addresses if len(ports) > 1 else ()
    for_bootstraps = {REASONING_KEY: secrets.token_urlsafe(TOKEN_BYTES), **environ}
    bootstraps = [_load_bootstrap(serve, flags, for_bootstraps, level, each, siblings) for each in ports]
    bootstrap, role = bootstraps[0], BootstrapSettings.role
    names = [role] if len(ports) == 1 else [f"{role}-{number}" for number in range(len(ports))]
    workers = _plan_workers(serve, flags, environ, cores, level, ",".join(addresses))
    scheme = "http" if bootstrap.http_tls is None else "https"
    shares = deal_gpus(gpus, [each.topology.ranks for each in workers])
    return StackPlan(
        bootstraps=tuple(
            StackCommand(role, name, tuple(to_flags(each)), to_environ(each))
            for name, each in zip(names, bootstraps, strict=True)
        ),
        workers=tuple(_part(each, share) for each, share in zip(workers, shares, strict=True)),
        bootstrap_addresses=addresses,
        url=f"{scheme}://{join_address(reachable, serve.port)}",
        model=bootstrap.model,
        load_format=bootstrap.load_format,
        drain_timeout_ms=bootstrap.drain_timeout_ms,
        tls=bootstrap.tls,
        http_tls=bootstrap.http_tls,
        run_token=bootstrap.run_token,
        api_key=first_key(bootstrap.api_keys, bootstrap.api_key_file),
        operators=_operators(bootstrap),
    )


def _load_bootstrap(
    serve: ServeSettings,
    flags: Flags,
    environ: Mapping[str, str],
    level: Mapping[str, str],
    ports: BootstrapPorts,
    siblings: Sequence[str],
) -> BootstrapSettings:
    """Return the settings of one bootstrap. `siblings`: gRPC addresses of all bootstraps, if several share
    the HTTP port."""
    own = {"host": serve.host, "http_port": str(serve.port), "reuse_port": str(bool(siblings)).lower()}
    own["peer_bootstraps"] = ",".join(siblings)
    if ports.admin is not None:
        own["admin_port"] = str(ports.admin)
    return _load(
        BootstrapSettings,
        flags,
        environ,
        {**level, **own}
        | {"grpc_host": serve.grpc_host, "grpc_port": str(ports.grpc)}
        | grpc_certificate(serve, BootstrapSettings.role)
        | https_certificate(serve, flags, environ),
    )


def _plan_workers(
    serve: ServeSettings,
    flags: Flags,
    environ: Mapping[str, str],
    cores: Sequence[int],
    level: Mapping[str, str],
    bootstraps: str,
) -> list[AnyWorker]:
    """Return the settings of each worker: prefill workers, then decode workers, then those that serve both
    sides."""
    prefill_ranks = serve.prefill_tp * serve.prefill_pp
    one_sided = serve.prefill * prefill_ranks + serve.decode * serve.decode_tp
    for_both, cores = cut_cores(cores, serve.both, one_sided)
    for_prefill, for_decode = share_cores(cores, serve.prefill, serve.decode, prefill_ranks, serve.decode_tp)

    def workers(
        cls: type[Worker], shares: Sequence[Cores], ports: Sequence[int], shape: Mapping[str, int]
    ) -> list[AnyWorker]:
        sizes = {name: str(ranks) for name, ranks in shape.items()}
        given = {**level, **sizes, **grpc_certificate(serve, cls.role)}
        is_one_process = max(shape.values(), default=1) == 1
        return [
            _load(
                cls,
                flags,
                environ,
                given | _decided(cls.role, index, cpus, port, bootstraps, is_one_process),
            )
            for index, (cpus, port) in enumerate(zip(shares, ports, strict=True))
        ]

    ports = serve.metrics_ports
    prefill_ports, decode_ports = ports[: serve.prefill], ports[serve.prefill :][: serve.decode]
    both_ports = ports[serve.prefill + serve.decode :]
    prefill_shape = {"tp": serve.prefill_tp, "pp": serve.prefill_pp}
    return [
        *workers(PrefillSettings, for_prefill, prefill_ports, prefill_shape),
        *workers(DecodeSettings, for_decode, decode_ports, {"tp": serve.decode_tp}),
        *workers(BothSettings, for_both, both_ports[::2], {}),
    ]


def given_admin_address(flags: Flags, environ: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the host of the pages for operators, and the port that the user has given for them, or None.
    Raises SettingsError."""
    settings = _load(BootstrapSettings, flags, environ, {})
    return settings.admin_host, settings.admin_port


def _operators(bootstrap: BootstrapSettings) -> Operators:
    """Return which callers may read the pages for operators. Raises StartupError."""
    if bootstrap.admin_api_keys or bootstrap.admin_api_key_file:
        return Operators.ADMINS
    if bootstrap.admin_port is not None or bootstrap.open_admin:
        return Operators.CALLERS
    is_closed = has_several_keys(bootstrap.api_keys, bootstrap.api_key_file)
    return Operators.NOBODY if is_closed else Operators.CALLERS


def _decided(
    role: str, index: int, cpus: Cores, metrics_port: int, bootstraps: str, is_one_process: bool
) -> dict[str, str]:
    """Return the settings of a worker that the plan itself decides.

    `bootstraps`: addresses of all bootstraps, by commas. `is_one_process`: whether the worker is one process,
    rather than several that share its cores.
    """
    decided = {
        "name": f"{role}-{index}",
        "host": LOOPBACK,
        "grpc_port": "0",
        "metrics_port": str(metrics_port),
        "bootstrap": bootstraps,
        "cpus": ",".join(map(str, cpus)),
        "threads": str(len(cpus) if is_one_process else 0),
    }
    if role == BothSettings.role and metrics_port:
        decided["prefill_metrics_port"] = str(metrics_port + 1)
    return decided


def _part(settings: AnyWorker, gpus: Gpus) -> StackCommand:
    """Return the command line of a worker with these settings.

    The worker sees only `gpus`, numbered from 0. It sees all if its `--device` is the CPU or names a GPU.
    """
    own = {VISIBLE: ",".join(gpus)} if gpus and settings.device in ON_GPUS else {}
    environ = to_environ(settings) | own
    return StackCommand(
        settings.role, settings.name, tuple(to_flags(settings)), environ, not settings.launches
    )


def _load(
    cls: type[Service], flags: Flags, environ: Mapping[str, str], decided: Mapping[str, str]
) -> Service:
    """Return a service's settings. They are those that `baton serve` was given for it, and those `decided` by
    the plan, which win."""
    passed = {each.name for group in passed_on().values() for each in group}
    taken = [each for each in settings_of(cls) if each.name in passed]
    names = [each.name for each in taken]
    variables = {variable for each in taken for variable in each.variables}
    given = {variable: text for variable, text in environ.items() if variable in variables}
    return load(cls, {**{name: flags.get(name) for name in names}, **decided}, given)
