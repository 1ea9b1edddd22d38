"""What can be set on `baton serve`, and what does each of its parts get?

It takes its own settings and those of the three services that it does not decide itself, and hands
each part the command line that a pod would run.
"""

import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from baton.bootstrap.settings import BootstrapSettings
from baton.both.settings import BothSettings, side_names
from baton.cli.options import Flags
from baton.decode.settings import DecodeSettings
from baton.launch.core_shares import Cores, cut_cores, share_cores
from baton.launch.gpus import VISIBLE, Gpus, deal_gpus
from baton.prefill.settings import PrefillSettings
from baton.runtime.errors import SettingsError
from baton.runtime.service_settings import LOG_LEVEL
from baton.runtime.setting_kinds import DURATION_MS, HOST, PORT, TEXT, join_address, number
from baton.runtime.settings import (
    PREFIX,
    Setting,
    load,
    setting,
    settings_of,
    to_environ,
    to_flags,
    variables_of,
)
from baton.runtime.tls_files import TlsFiles
from baton.runtime.worker_settings import WILDCARDS
from baton.web.api_keys import first_key, has_several_keys

SERVICES: Final = (BootstrapSettings, PrefillSettings, DecodeSettings, BothSettings)


class Operators(Enum):
    """Who reads the pages for operators."""

    CALLERS = "whoever may call their port"
    ADMINS = "admin keys"
    NOBODY = "nobody"


Service = TypeVar("Service", BootstrapSettings, PrefillSettings, DecodeSettings, BothSettings)
Worker = TypeVar("Worker", PrefillSettings, DecodeSettings, BothSettings)
AnyWorker: TypeAlias = PrefillSettings | DecodeSettings | BothSettings
LOOPBACK: Final = "127.0.0.1"
PORT_MAX: Final = 65_535
RUN_TOKEN: Final = f"{PREFIX}RUN_TOKEN"
TOKEN_BYTES: Final = 32
ON_GPUS: Final = ("auto", "cuda")
"""Values of `--device` that leave the choice of a GPU to us."""
CHOSEN: Final = frozenset(
    {"advertise", "http_port", "grpc_host", "name", "bootstrap", "cpus", "threads"}
    | {"exit_digest", "exit_file"}
    | {"tp", "pp", "rank", "world", "rendezvous", "machines", "machine"}
    | {"tls_cert", "tls_key", "tls_ca"}
    | {"side", "prefill_grpc_port", "prefill_metrics_port"}
)
"""Settings of a service that `baton serve` chooses for each part."""

AMBIGUOUS: Final = frozenset({"transfer_timeout_ms"})
"""Settings that mean another thing on prefill than on decode."""

FIRST_DAY: Final = (
    *("model", "served_model_name", "host", "port", "prefill", "decode"),
    *("dtype", "device", "kv_cache_memory", "api_key_file"),
)
"""Settings that most people change, in the order in which they ask for them."""

NOT_TAKEN: Final = CHOSEN | AMBIGUOUS
OF_WORKERS: Final = {
    "prefill_tp": "prefill",
    "prefill_pp": "prefill",
    "decode_tp": "decode",
    "prefill_weight": "both",
}
"""Flags of the workers that another flag starts."""
"""Settings of a service that `baton serve` does not take."""

INSTEAD: Final[Mapping[str, str]] = {
    "tp": "--prefill-tp and --decode-tp",
    "pp": "--prefill-pp",
    "http_port": "--port",
    "grpc_host": "--host with --tls-dir",
    **dict.fromkeys(("tls_cert", "tls_key", "tls_ca"), "--tls-dir"),
}
"""What it takes for some of them."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What only the whole stack has."""

    prefill: int = setting(1, "Prefill workers to start; with --both none, if not given.", number(0, 64))
    decode: int = setting(1, "Decode workers to start; with --both none, if not given.", number(0, 64))
    both: int = setting(
        0,
        "Workers to start that serve both sides, each in one process with one set of weights.",
        number(0, 64),
    )
    prefill_tp: int = setting(1, "Tensor-parallel ranks of each prefill worker.", number(1, 64))
    prefill_pp: int = setting(1, "Pipeline-parallel ranks of each prefill worker.", number(1, 64))
    decode_tp: int = setting(1, "Tensor-parallel ranks of each decode worker.", number(1, 64))
    host: str = setting(
        LOOPBACK,
        "Address that the OpenAI HTTP API listens on, and with --tls-dir the port that workers register at:"
        " without it that one is this machine's alone, like the workers.",
        HOST,
    )
    port: int = setting(8000, "Port of the OpenAI HTTP API.", number(1, 65535))
    grpc_port: int = setting(8100, "Port that workers register at (0: any free one).", PORT)
    metrics_port: int = setting(
        0,
        "Port of the first worker's /metrics, on this machine alone; the others have the next ones, prefill"
        " before decode, and decode's before prefill's of one that serves both sides (0: any free ones).",
        PORT,
    )
    tls_dir: str = setting(
        "",
        "Directory made by `baton certs`: HTTPS, and mutual TLS between the parts (not given: plain).",
        TEXT,
    )
    log_level: str = setting("warning", "Least severe log lines of the parts to show.", LOG_LEVEL)
    ready_timeout_ms: int = setting(
        600_000, "Longest wait for a part to be ready; loading a large model takes minutes.", DURATION_MS
    )

    @property
    def grpc_host(self) -> str:
        """Who can reach the port that workers register at can be one, unless they need certificates."""
        return self.host if self.tls_dir else LOOPBACK

    @property
    def metrics_ports(self) -> Sequence[int]:
        """Of each worker, prefill before decode, and then two of each that serves both sides, decode's first;
        0 is any free one."""
        workers = self.prefill + self.decode + 2 * self.both
        return range(self.metrics_port, self.metrics_port + workers) if self.metrics_port else [0] * workers

    def __post_init__(self) -> None:
        if not (self.both or (self.prefill and self.decode)):
            raise SettingsError(
                f"--prefill {self.prefill} --decode {self.decode}: give one of each at least, or --both"
            )
        first, last = self.metrics_port, self.metrics_ports[-1]
        if last > PORT_MAX:
            raise SettingsError(
                f"--metrics-port {first}: the last worker would have {last}, and ports end at {PORT_MAX}"
            )


@dataclass(frozen=True, slots=True)
class StackCommand:
    """One command of the stack: a service's process, or a launcher with the ranks of a worker."""

    role: str
    """bootstrap, prefill, decode or worker: the command it runs."""
    name: str
    flags: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What no command line may show, and what it has no flag for."""
    computes: bool = False
    """It loads the model itself, rather than starting the ranks that do, or needing none."""

    @property
    def registers_as(self) -> tuple[str, ...]:
        """The names by which the bootstrap knows its process."""
        match self.role:
            case BootstrapSettings.role:
                return ()
            case BothSettings.role:
                return side_names(self.name)
        return (self.name,)


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What to start: the bootstrap first, then the workers; stopped in the same order."""

    bootstrap: StackCommand
    workers: tuple[StackCommand, ...]
    bootstrap_address: str
    """Where the workers register, host:port."""
    url: str
    """Where this machine reaches the HTTP API."""
    model: str
    load_format: str
    drain_timeout_ms: int
    tls: TlsFiles | None
    """What the bootstrap believes this command by."""
    http_tls: TlsFiles | None
    api_key: str = field(repr=False)
    """One that the API takes; empty if it asks for none."""
    operators: Operators
    """Who reads the pages for operators."""
    run_token: str = field(repr=False)
    """What the parts show each other; empty where they show certificates."""


def passed_on() -> dict[str, tuple[Setting, ...]]:
    """The services' settings that `baton serve` takes and hands on, each once, by who gets them. A worker of
    both sides gets all that one of either side does."""
    own = {each.name for each in settings_of(ServeSettings)}
    takers: dict[Setting, list[str]] = {}
    for cls in SERVICES:
        for each in settings_of(cls):
            if each.name not in own | NOT_TAKEN and not (cls is BothSettings and each in takers):
                takers.setdefault(each, []).append(cls.role.capitalize())
    groups: dict[str, tuple[Setting, ...]] = {}
    for each, roles in takers.items():
        group = "All parts" if len(roles) == len(SERVICES) - 1 else " and ".join(roles)
        groups[group] = (*groups.get(group, ()), each)
    return groups


def panels() -> dict[str, tuple[Setting, ...]]:
    """All that `baton serve` takes, by the headings of its help: what is set on the first day comes first."""
    groups = {"The stack": tuple(settings_of(ServeSettings)), **passed_on()}
    by_name = {each.name: each for group in groups.values() for each in group}
    first = {"To begin with": tuple(by_name[name] for name in FIRST_DAY)}
    rest = {
        title: tuple(each for each in group if each.name not in FIRST_DAY) for title, group in groups.items()
    }
    return first | rest


def not_taken() -> tuple[Setting, ...]:
    """The services' settings that it does not, each once."""
    found = {each.name: each for cls in SERVICES for each in settings_of(cls) if each.name in NOT_TAKEN}
    return tuple(found[name] for name in sorted(found))


def load_serve(flags: Flags, environ: Mapping[str, str], also_known: frozenset[str]) -> ServeSettings:
    """The stack's own settings. Raises SettingsError, also for a flag or variable that would have no effect,
    and for certificates that are not there."""
    own = {each.name: flags.get(each.name) for each in settings_of(ServeSettings)}
    known = also_known | variables_of(*SERVICES)
    if load(ServeSettings, {"both": own["both"]}, _of_both(environ), known).both:
        for each in settings_of(ServeSettings):
            if each.name in ("prefill", "decode") and _given_by(each, flags, environ) is None:
                own[each.name] = "0"
    settings = load(ServeSettings, own, environ, known)
    _check_counts(settings, flags, environ)
    for each in not_taken():
        if (given := _given_by(each, flags, environ)) is not None:
            instead = f"give {INSTEAD[each.name]}" if each.name in INSTEAD else "leave it out"
            raise SettingsError(f"{given} is not taken by baton serve, only by its parts: {instead}")
    _check_certificates(settings, flags, environ)
    return settings


def _of_both(environ: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in environ.items() if name == f"{PREFIX}BOTH"}


def _given_by(each: Setting, flags: Flags, environ: Mapping[str, str]) -> str | None:
    """The flag or variable that says it, if one does."""
    if flags.get(each.name) is not None:
        return each.flag
    return each.variable if each.variable in environ else None


def _check_counts(settings: ServeSettings, flags: Flags, environ: Mapping[str, str]) -> None:
    """Raises SettingsError for what is said of workers of which there are none."""
    for each in (*settings_of(ServeSettings), *settings_of(BothSettings)):
        side = OF_WORKERS.get(each.name)
        if side is None or getattr(settings, side):
            continue
        if (given := _given_by(each, flags, environ)) is not None:
            raise SettingsError(f"{given} is of workers that --{side} starts, and it starts none")


def make_plan(
    serve: ServeSettings,
    flags: Flags,
    environ: Mapping[str, str],
    cores: Sequence[int],
    grpc_port: int,
    gpus: Gpus = (),
) -> StackPlan:
    """Each part's command line. `cores` and `gpus` are dealt out to the workers; `grpc_port` is the real one,
    never 0. Raises SettingsError."""
    if not serve.tls_dir:
        environ = {RUN_TOKEN: secrets.token_urlsafe(TOKEN_BYTES), **environ}
    reachable = LOOPBACK if serve.host in WILDCARDS else serve.host
    address = join_address(reachable if serve.tls_dir else LOOPBACK, grpc_port)
    # Parts tell at least what went on before a failure; the screen shows what `--log-level` asks for.
    level = {"log_level": "debug" if serve.log_level == "debug" else "info"}
    bootstrap = _load(
        BootstrapSettings,
        flags,
        environ,
        level
        | {"host": serve.host, "http_port": str(serve.port)}
        | {"grpc_host": serve.grpc_host, "grpc_port": str(grpc_port)}
        | _own_certificate(serve, BootstrapSettings.role)
        | _https(serve, flags, environ),
    )
    prefill_ranks = serve.prefill_tp * serve.prefill_pp
    one_sided = serve.prefill * prefill_ranks + serve.decode * serve.decode_tp
    for_both, cores = cut_cores(cores, serve.both, one_sided)
    for_prefill, for_decode = share_cores(cores, serve.prefill, serve.decode, prefill_ranks, serve.decode_tp)

    def workers(
        cls: type[Worker], shares: Sequence[Cores], ports: Sequence[int], shape: Mapping[str, int]
    ) -> list[AnyWorker]:
        given = (
            level | {name: str(ranks) for name, ranks in shape.items()} | _own_certificate(serve, cls.role)
        )
        one = max(shape.values(), default=1) == 1
        return [
            _load(cls, flags, environ, given | _decided(cls.role, index, cpus, port, address, one))
            for index, (cpus, port) in enumerate(zip(shares, ports, strict=True))
        ]

    ports = serve.metrics_ports
    prefill_ports, decode_ports = ports[: serve.prefill], ports[serve.prefill :][: serve.decode]
    both_ports = ports[serve.prefill + serve.decode :]
    all_workers = [
        *workers(
            PrefillSettings, for_prefill, prefill_ports, {"tp": serve.prefill_tp, "pp": serve.prefill_pp}
        ),
        *workers(DecodeSettings, for_decode, decode_ports, {"tp": serve.decode_tp}),
        *workers(BothSettings, for_both, both_ports[::2], {}),
    ]
    shares = deal_gpus(gpus, [each.topology.ranks for each in all_workers])
    return StackPlan(
        bootstrap=StackCommand(
            bootstrap.role, bootstrap.role, tuple(to_flags(bootstrap)), to_environ(bootstrap)
        ),
        workers=tuple(_part(each, share) for each, share in zip(all_workers, shares, strict=True)),
        bootstrap_address=address,
        url=f"{'http' if bootstrap.http_tls is None else 'https'}://{join_address(reachable, serve.port)}",
        model=bootstrap.model,
        load_format=bootstrap.load_format,
        drain_timeout_ms=bootstrap.drain_timeout_ms,
        tls=bootstrap.tls,
        http_tls=bootstrap.http_tls,
        run_token=bootstrap.run_token,
        api_key=first_key(bootstrap.api_keys, bootstrap.api_key_file),
        operators=_operators(bootstrap),
    )


def _operators(bootstrap: BootstrapSettings) -> Operators:
    """Raises StartupError."""
    if bootstrap.admin_api_keys or bootstrap.admin_api_key_file:
        return Operators.ADMINS
    if bootstrap.admin_port is not None or bootstrap.open_admin:
        return Operators.CALLERS
    closed = has_several_keys(bootstrap.api_keys, bootstrap.api_key_file)
    return Operators.NOBODY if closed else Operators.CALLERS


def _own_certificate(serve: ServeSettings, role: str) -> dict[str, str]:
    """A part's flags for its certificate, as `baton certs` names the files."""
    if not serve.tls_dir:
        return {}
    folder = Path(serve.tls_dir)
    return {
        "tls_cert": str(folder / f"{role}.crt"),
        "tls_key": str(folder / f"{role}.key"),
        "tls_ca": str(folder / "ca.crt"),
    }


def _https(serve: ServeSettings, flags: Flags, environ: Mapping[str, str]) -> dict[str, str]:
    """The same for the API, unless it has a certificate of its own."""
    own = ("http_tls_cert", "http_tls_key")
    if not serve.tls_dir or any(flags.get(name) or PREFIX + name.upper() in environ for name in own):
        return {}
    folder = Path(serve.tls_dir)
    return {"http_tls_cert": str(folder / "http.crt"), "http_tls_key": str(folder / "http.key")}


def _check_certificates(serve: ServeSettings, flags: Flags, environ: Mapping[str, str]) -> None:
    """Raises SettingsError for files of `--tls-dir` that cannot be read."""
    parts = [cls.role for cls in SERVICES if serve.both or cls is not BothSettings]
    needed = [_own_certificate(serve, role) for role in parts] + [_https(serve, flags, environ)]
    paths = dict.fromkeys(Path(path) for files in needed for path in files.values())
    missing = [path.name for path in paths if not os.access(path, os.R_OK)]
    if missing:
        there = Path(serve.tls_dir).is_dir()
        why = f"{', '.join(missing)} cannot be read there" if there else "there is no such directory"
        command = f"baton certs {shlex.quote(serve.tls_dir)}"
        raise SettingsError(f"--tls-dir {serve.tls_dir}: {why}; `{command}` makes what is needed")


def _decided(
    role: str, index: int, cpus: Cores, metrics_port: int, bootstrap_address: str, one: bool
) -> dict[str, str]:
    """`one`: the worker is one process, rather than several that share its cores."""
    decided = {
        "name": f"{role}-{index}",
        "host": LOOPBACK,
        "grpc_port": "0",
        "metrics_port": str(metrics_port),
        "bootstrap": bootstrap_address,
        "cpus": ",".join(map(str, cpus)),
        "threads": str(len(cpus) if one else 0),
    }
    if role == BothSettings.role and metrics_port:
        decided["prefill_metrics_port"] = str(metrics_port + 1)
    return decided


def _part(settings: AnyWorker, gpus: Gpus) -> StackCommand:
    """It sees `gpus` alone and counts them from 0, unless it computes elsewhere or on one that was named."""
    own = {VISIBLE: ",".join(gpus)} if gpus and settings.device in ON_GPUS else {}
    environ = to_environ(settings) | own
    return StackCommand(
        settings.role, settings.name, tuple(to_flags(settings)), environ, not settings.launches
    )


def _load(
    cls: type[Service], flags: Flags, environ: Mapping[str, str], decided: Mapping[str, str]
) -> Service:
    taken = {each.name for group in passed_on().values() for each in group}
    names = taken & {each.name for each in settings_of(cls)}
    handed = {variable: text for variable, text in environ.items() if variable in _variables(names)}
    return load(cls, {**{name: flags.get(name) for name in names}, **decided}, handed)


def _variables(names: set[str]) -> set[str]:
    return {PREFIX + name.upper() for name in names}
