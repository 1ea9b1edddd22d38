"""What can be set on a worker, prefill and decode alike?"""

import socket
from dataclasses import dataclass
from typing import ClassVar

from services.pages.checksum import KvChecksum
from services.runtime.errors import SettingsError
from services.runtime.service_settings import ServiceSettings
from services.runtime.setting_kinds import (
    ADDRESS,
    CPUS,
    PORT,
    POSITIVE,
    SIZE,
    TEXT,
    choices,
    matching,
    number,
)
from services.runtime.settings import setting

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104
NAME = matching(r"[A-Za-z0-9._-]{0,128}", "NAME", "up to 128 letters, digits, dots, dashes or underscores")
DEVICE = matching(r"auto|cpu|cuda(:\d{1,3})?", "auto|cpu|cuda[:N]", "auto, cpu, cuda or cuda:N")
DTYPE = choices("auto", "bfloat16", "float32")
CHECKSUM = choices(*(each.value for each in KvChecksum))


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ServiceSettings):
    """Common to both roles. Sizes are bytes, times milliseconds."""

    role: ClassVar[str]

    name: str = setting("", "Name of this worker, unique in the stack (not given: role-hostname).", NAME)
    bootstrap: str = setting("127.0.0.1:8100", "The bootstrap's gRPC address.", ADDRESS)
    grpc_port: int = setting(0, "gRPC port to listen on (0: any free one).", PORT)
    metrics_port: int = setting(0, "Port of /metrics, /health and /ready (0: any free one).", PORT)
    model: str = setting("demo", "A model directory, a GGUF file, or the word demo.", TEXT)
    dtype: str = setting("auto", "Number format of weights and KV (auto: bfloat16).", DTYPE)
    device: str = setting("auto", "Where to compute (auto: CUDA if there is one).", DEVICE)
    kv_cache_memory: int = setting(2**30, "Memory for KV pages; never exceeded.", SIZE)
    page_tokens: int = setting(16, "Tokens per KV page; the same on every worker.", number(1, 4096))
    kv_checksum: str = setting(
        KvChecksum.RECORD.value,
        "What is checked of a hand-over, the same on every worker: the metadata record's checksum, with pages"
        " also the contents of the KV pages, or neither.",
        CHECKSUM,
    )
    max_rooms: int = setting(256, "Most rooms held at once, waiting ones included.", POSITIVE)
    threads: int = setting(0, "Compute threads (0: as many as the cores it may use).", number(0, 4096))
    cpus: tuple[int, ...] = setting((), "Cores to run on, such as 0,2-3 (not given: all).", CPUS)
    transfer_window: int = setting(4 * 2**20, "Most bytes of KV posted to a peer in one write.", SIZE)

    def __post_init__(self) -> None:
        if self.host in WILDCARDS and not self.advertise:
            raise SettingsError(
                f"--advertise is needed with --host {self.host}: peers cannot connect to {self.host}"
            )
        super().__post_init__()
        if not self.name:
            object.__setattr__(self, "name", f"{self.role}-{socket.gethostname()}")
