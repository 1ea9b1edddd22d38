"""Settings of a worker whose one process serves both prefill and decode."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from baton.decode.settings import DecodeSettings
from baton.prefill.settings import PrefillSettings
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WEIGHT_TOTAL
from baton.runtime.errors import SettingsError
from baton.runtime.setting_kinds import NAME_CHARS_MAX, PORT, choices, number
from baton.runtime.settings import setting, settings_of

SIDES: Final = choices("both", *(side.value for side in Side))


def side_name(process: str, side: Side) -> str:
    """Return the name under which the bootstrap knows one side of a process, such as `w0-prefill`."""
    return f"{process}-{side.value}"


def side_names(process: str) -> tuple[str, ...]:
    """Return the names under which the bootstrap knows the two sides of a process, such as `w0-prefill` and
    `w0-decode`."""
    return tuple(side_name(process, side) for side in Side)


@dataclass(frozen=True, kw_only=True)
class PrefillSideSettings(PrefillSettings):
    """Settings of the prefill side of a process that also decodes. Its ports have their own flags."""

    grpc_port_flag: ClassVar[str] = "--prefill-grpc-port"
    metrics_port_flag: ClassVar[str] = "--prefill-metrics-port"


@dataclass(frozen=True, kw_only=True)
class BothSettings(DecodeSettings, PrefillSettings):
    """Settings of a process that serves both prefill and decode. If a setting means different things on the
    two sides, it has the meaning of the decode side."""

    role: ClassVar[str] = "worker"

    side: str = setting("both", "Which side the worker serves, or both in one process.", SIDES)
    prefill_weight: int = setting(
        WEIGHT_TOTAL // 2,
        "Of 100 parts of the process's time: so many are meant for prefill, the others for decode. A side"
        " with 0 gets no request while another worker serves that side. `baton role` changes it at once.",
        number(0, WEIGHT_TOTAL),
    )
    prefill_grpc_port: int = setting(
        0, "gRPC port of the prefill side; --grpc-port is of the decode side (0: any free one).", PORT
    )
    prefill_metrics_port: int = setting(
        0,
        "Port of the prefill side's /metrics, /started, /health and /ready; --metrics-port is of the decode"
        " side (0: any free one).",
        PORT,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in side_names(self.name):
            if len(name) > NAME_CHARS_MAX:
                raise SettingsError(f"--name: {name}, with its side, has over {NAME_CHARS_MAX} characters")
        if self.topology.ranks > 1:
            raise SettingsError(
                f"{self.dimensions}: a process that serves both sides is one rank; for more, start workers of"
                " one side each"
            )

    @property
    def of_engine(self) -> "BothSettings":
        """Settings with which the engine of one side is loaded. They are the process's settings, but with
        half of the KV cache memory."""
        return replace(self, kv_cache_memory=self.kv_cache_memory // 2)

    @property
    def of_prefill(self) -> PrefillSettings:
        """Settings of the prefill side of this process."""
        given = self._given(PrefillSettings, Side.PREFILL)
        del given["transfer_timeout_ms"]  # it has another meaning on that side
        ports = {"grpc_port": self.prefill_grpc_port, "metrics_port": self.prefill_metrics_port}
        return PrefillSideSettings(**{**given, **ports})

    @property
    def of_decode(self) -> DecodeSettings:
        """Settings of the decode side of this process."""
        given = self._given(DecodeSettings, Side.DECODE)
        return DecodeSettings(**given | {"kv_events_endpoint": "", "kv_events_replay_endpoint": ""})

    def _given(self, cls: type, side: Side) -> dict[str, Any]:
        """Return the values of one side for the settings of class `cls`, by name. Each side has a name of its
        own and half of the KV cache memory."""
        given = {each.name: getattr(self, each.name) for each in settings_of(cls)}
        return given | {
            "name": side_name(self.name, side),
            "kv_cache_memory": self.kv_cache_memory // 2,
        }
