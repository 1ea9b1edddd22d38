"""Settings of `baton serve`: its own, and those that it passes on to its services."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.bootstrap.settings import BootstrapSettings
from baton.both.settings import BothSettings
from baton.decode.settings import DecodeSettings
from baton.prefill.settings import PrefillSettings
from baton.runtime.errors import SettingsError
from baton.runtime.service_settings import LOG_LEVEL
from baton.runtime.setting_kinds import DURATION_MS, HOST, PORT, TEXT, number
from baton.runtime.settings import PREFIX, Flags, Setting, load, setting, settings_of, variables_of

SERVICES: Final = (BootstrapSettings, PrefillSettings, DecodeSettings, BothSettings)
LOOPBACK: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
DEFAULT_URL: Final = f"http://{LOOPBACK}:{DEFAULT_PORT}"
"""URL of the HTTP API of a stack that was started without flags."""
PORT_MAX: Final = 65_535
CHOSEN: Final = frozenset(
    {"advertise", "http_port", "reuse_port", "peer_bootstraps", "grpc_host"}
    | {"name", "bootstrap", "cpus", "threads"}
    | {"exit_digest", "exit_file"}
    | {"tp", "pp", "rank", "world", "rendezvous", "machines", "machine"}
    | {"tls_cert", "tls_key", "tls_ca"}
    | {"side", "prefill_grpc_port", "prefill_metrics_port"}
)
"""Settings of services that `baton serve` chooses for each process, so that users cannot give them."""

AMBIGUOUS: Final = frozenset({"transfer_timeout_ms"})
"""Settings that mean one thing on prefill and another on decode, so that `baton serve` does not
pass them on."""

FIRST_DAY: Final = (
    *("model", "served_model_name", "host", "port", "prefill", "decode"),
    *("dtype", "device", "kv_cache_memory", "api_key_file"),
)
"""Settings that most users change, which `baton serve --help` shows first, in this order."""

NOT_TAKEN: Final = CHOSEN | AMBIGUOUS
"""Settings of services that `baton serve` does not accept."""
NEEDED_WORKERS: Final = {
    "prefill_tp": "prefill",
    "prefill_pp": "prefill",
    "decode_tp": "decode",
    "prefill_weight": "both",
}
"""Settings of `baton serve` that have an effect only on some workers. Each is listed with the setting that
starts such workers."""

INSTEAD: Final[Mapping[str, str]] = {
    "tp": "--prefill-tp and --decode-tp",
    "pp": "--prefill-pp",
    "http_port": "--port",
    "reuse_port": "--bootstraps",
    "peer_bootstraps": "--bootstraps",
    "grpc_host": "--host with --tls-dir",
    **dict.fromkeys(("tls_cert", "tls_key", "tls_ca"), "--tls-dir"),
}
"""Flags to suggest for settings of services that `baton serve` does not accept."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of `baton serve` that concern the stack as a whole."""

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
    bootstraps: int = setting(
        1,
        "Bootstraps to start, each a process. They share --port, and each has a port for workers and one for"
        " operators' pages (the next ones after --grpc-port and --admin-port).",
        number(1, 64),
    )
    host: str = setting(
        LOOPBACK,
        "Address that the OpenAI HTTP API listens on, and with --tls-dir the port that workers register at:"
        " without it that one is this machine's alone, like the workers.",
        HOST,
    )
    port: int = setting(DEFAULT_PORT, "Port of the OpenAI HTTP API.", number(1, 65535))
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
        """Host of the gRPC port at which workers register.

        Without certificates any program that reaches the port could register, so it is the loopback address.
        """
        return self.host if self.tls_dir else LOOPBACK

    @property
    def metrics_ports(self) -> Sequence[int]:
        """Metrics ports of all workers, prefill before decode; 0 stands for any free port.

        Workers that serve both sides come last. Each has two ports, decode's first.
        """
        workers = self.prefill + self.decode + 2 * self.both
        return range(self.metrics_port, self.metrics_port + workers) if self.metrics_port else [0] * workers

    def __post_init__(self) -> None:
        if not (self.both or (self.prefill and self.decode)):
            raise SettingsError(
                f"--prefill {self.prefill} --decode {self.decode}: give one of each at least, or --both"
            )
        if self.grpc_port and self.grpc_port + self.bootstraps - 1 > PORT_MAX:
            raise SettingsError(
                f"--grpc-port {self.grpc_port}: {self.bootstraps} bootstraps have one each, and ports end at"
                f" {PORT_MAX}"
            )
        first, last = self.metrics_port, self.metrics_ports[-1]
        if last > PORT_MAX:
            raise SettingsError(
                f"--metrics-port {first}: the last worker would have {last}, and ports end at {PORT_MAX}"
            )


def passed_on() -> dict[str, tuple[Setting, ...]]:
    """Return the settings that `baton serve` passes on to services, as tuples by the services that get them.

    A worker that serves both sides gets all settings of both sides.
    """
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
    """Return all settings of `baton serve` by the headings of its help, with the settings of
    FIRST_DAY first."""
    groups = {"The stack": tuple(settings_of(ServeSettings)), **passed_on()}
    by_name = {each.name: each for group in groups.values() for each in group}
    first = {"To begin with": tuple(by_name[name] for name in FIRST_DAY)}
    rest = {
        title: tuple(each for each in group if each.name not in FIRST_DAY) for title, group in groups.items()
    }
    return first | rest


def not_taken() -> tuple[Setting, ...]:
    """Return the services' settings that `baton serve` does not accept, each once, by name."""
    found = {each.name: each for cls in SERVICES for each in settings_of(cls) if each.name in NOT_TAKEN}
    return tuple(found[name] for name in sorted(found))


def load_serve(flags: Flags, environ: Mapping[str, str], also_known: frozenset[str]) -> ServeSettings:
    """Return the settings of `baton serve` itself.

    Raises SettingsError, also for a flag or variable without effect, and for certificates that are missing.
    """
    own = {each.name: flags.get(each.name) for each in settings_of(ServeSettings)}
    known = also_known | variables_of(*SERVICES)
    if load(ServeSettings, {"both": own["both"]}, _variable_of_both(environ), known).both:
        for each in settings_of(ServeSettings):
            if each.name in ("prefill", "decode") and _source_of(each, flags, environ) is None:
                own[each.name] = "0"
    settings = load(ServeSettings, own, environ, known)
    _check_counts(settings, flags, environ)
    for each in not_taken():
        if (given := _source_of(each, flags, environ)) is not None:
            instead = f"give {INSTEAD[each.name]}" if each.name in INSTEAD else "leave it out"
            raise SettingsError(f"{given} is not taken by baton serve, only by its parts: {instead}")
    _check_certificates(settings, flags, environ)
    return settings


def _variable_of_both(environ: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in environ.items() if name == f"{PREFIX}BOTH"}


def _source_of(each: Setting, flags: Flags, environ: Mapping[str, str]) -> str | None:
    """Return the text that names the source of a setting: its flag or environment variable. None if it is not
    given."""
    if flags.get(each.name) is not None:
        return each.flag
    return next((name for name in each.variables if name in environ), None)


def _check_counts(settings: ServeSettings, flags: Flags, environ: Mapping[str, str]) -> None:
    """Raise SettingsError if a setting is given for workers that are not started."""
    for each in (*settings_of(ServeSettings), *settings_of(BothSettings)):
        starter = NEEDED_WORKERS.get(each.name)
        if starter is None or getattr(settings, starter):
            continue
        if (given := _source_of(each, flags, environ)) is not None:
            raise SettingsError(f"{given} is of workers that --{starter} starts, and it starts none")


def grpc_certificate(serve: ServeSettings, role: str) -> dict[str, str]:
    """Return a service's settings for its gRPC certificate, with the file names that `baton certs` makes."""
    if not serve.tls_dir:
        return {}
    folder = Path(serve.tls_dir)
    return {
        "tls_cert": str(folder / f"{role}.crt"),
        "tls_key": str(folder / f"{role}.key"),
        "tls_ca": str(folder / "ca.crt"),
    }


def https_certificate(serve: ServeSettings, flags: Flags, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the bootstrap's settings for its HTTPS certificate, unless the user has given one."""
    own = ("http_tls_cert", "http_tls_key")
    if not serve.tls_dir or any(flags.get(name) or PREFIX + name.upper() in environ for name in own):
        return {}
    folder = Path(serve.tls_dir)
    return {"http_tls_cert": str(folder / "http.crt"), "http_tls_key": str(folder / "http.key")}


def _check_certificates(serve: ServeSettings, flags: Flags, environ: Mapping[str, str]) -> None:
    """Raise SettingsError if needed certificate files in `--tls-dir` cannot be read."""
    parts = [cls.role for cls in SERVICES if serve.both or cls is not BothSettings]
    needed = [grpc_certificate(serve, role) for role in parts] + [https_certificate(serve, flags, environ)]
    paths = dict.fromkeys(Path(path) for files in needed for path in files.values())
    missing = [path.name for path in paths if not os.access(path, os.R_OK)]
    if missing:
        exists = Path(serve.tls_dir).is_dir()
        why = f"{', '.join(missing)} cannot be read there" if exists else "there is no such directory"
        command = f"baton certs {shlex.quote(serve.tls_dir)}"
        raise SettingsError(f"--tls-dir {serve.tls_dir}: {why}; `{command}` makes what is needed")
