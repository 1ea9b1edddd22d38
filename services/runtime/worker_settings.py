"""Settings that prefill and decode workers have in common."""

import re
import socket
from dataclasses import dataclass
from typing import ClassVar, Final

from baton.pages.kv_checksum import KvChecksum
from baton.rooms.ballot import ROOMS_MAX
from baton.rooms.worker_facts import CANARY_ROOMS
from baton.runtime.errors import SettingsError
from baton.runtime.model_options import EngineName, Quantize
from baton.runtime.service_settings import HOST_OR_NONE, ServiceSettings
from baton.runtime.setting_kinds import (
    ADDRESS,
    ADDRESSES,
    CPUS,
    DURATION_MS,
    NAME,
    NAME_CHARS_MAX,
    PORT,
    SIZE,
    SWITCH,
    TEXT,
    choices,
    matching,
    number,
    optional,
)
from baton.runtime.settings import setting
from baton.topology import RANKS_MAX, Topology

OUTSIDE_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]")
"""Pattern of the characters that a host name may have and a worker's name may not."""
WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104
DEVICE: Final = matching(r"auto|cpu|cuda(:\d{1,3})?", "auto|cpu|cuda[:N]", "auto, cpu, cuda or cuda:N")
ENGINE: Final = choices(*(each.value for each in EngineName))
DTYPE: Final = choices("auto", "bfloat16", "float32")
QUANTIZE: Final = choices(*(each.value for each in Quantize))
ZMQ_ADDRESS: Final = matching(r"((tcp|ipc)://\S+)?", "ADDRESS", "tcp://HOST:PORT, tcp://*:PORT or ipc://PATH")
CHECKSUM: Final = choices(*(each.value for each in KvChecksum))
PARALLEL: Final = number(1, RANKS_MAX)
RANK: Final = optional(number(0, RANKS_MAX - 1), None)
RENDEZVOUS: Final = optional(ADDRESS, "")
EXIT_DIGEST: Final = matching("([0-9a-f]{64})?", "DIGEST", "64 hexadecimal digits")
GROUP_TIMEOUT_MS_MIN: Final = 2_000
"""Smallest time-out of a worker's rank group, in milliseconds. An idle leader takes a turn each second, and
the other ranks wait for it."""


@dataclass(frozen=True, slots=True)
class DraftModelFiles:
    """Draft model for speculative decoding: its files, and the memory of its KV pages."""

    model: str
    """Location of the draft model, a directory or a GGUF file, given as for `--model`."""
    kv_memory: int
    """Memory of the draft model's KV pages, in bytes."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ServiceSettings):
    """Settings common to prefill and decode workers. Sizes are in bytes, times in milliseconds."""

    role: ClassVar[str]
    grpc_port_flag: ClassVar[str] = "--grpc-port"
    metrics_port_flag: ClassVar[str] = "--metrics-port"
    """Name of the metrics port's flag, for the error if that port is in use."""

    name: str = setting("", "Name of this worker, unique in the stack (not given: role-hostname).", NAME)
    advertise: str = setting(
        "",
        "Address under which the bootstrap and the other side's workers reach this one (not given: the listen"
        " address).",
        HOST_OR_NONE,
    )
    bootstrap: tuple[str, ...] = setting(
        ("127.0.0.1:8100",),
        "The bootstraps' gRPC addresses, by commas. A name may stand for several, as that of a headless"
        " Service does: it is looked up again and again.",
        ADDRESSES,
    )
    grpc_port: int = setting(0, "gRPC port to listen on (0: any free one).", PORT)
    metrics_port: int = setting(0, "Port of /metrics, /started, /health and /ready (0: any free one).", PORT)
    model: str = setting("demo", "A model directory, a GGUF file, or the word demo.", TEXT)
    engine: str = setting(
        EngineName.AUTO.value,
        "What computes steps, the same on every worker: torch (Baton's own), vllm (vLLM's, installed beside"
        " Baton), or auto (vllm on a GPU where it is installed, else torch).",
        ENGINE,
    )
    dtype: str = setting(
        "auto", "Number format of weights and KV (auto: bfloat16 if the device has it, else float32).", DTYPE
    )
    quantize: str = setting(
        Quantize.NONE.value,
        "Keep weights as codes of 8 or 4 bits, the same on every worker: int8, int4 (made as they are"
        " loaded), or keep (a GGUF file's own). Decode on an x86 CPU multiplies codes, by half to a third of"
        " the reading; prefill multiplies what they stand for. One rank a worker.",
        QUANTIZE,
    )
    device: str = setting("auto", "Where to compute (auto: CUDA if there is one).", DEVICE)
    compiled_steps: bool = setting(
        True,
        "On an x86 CPU (from AVX2 on), compute a step by one call, compiled at the first start where there is"
        " a C compiler.",
        SWITCH,
    )
    kv_cache_memory: int = setting(
        2**30,
        "Memory for KV pages, of each rank; never exceeded. The default is small: give a GPU most of what the"
        " weights leave of its memory.",
        SIZE,
    )
    expected_context: int = setting(
        0,
        "Tokens of a sequence for which memory is divided, if a model's layers keep KV of several kinds (0:"
        " 4096, or the context length if that is less).",
        number(0, 2**24),
    )
    page_tokens: int = setting(
        16,
        "Tokens per KV page; of any two workers, one's a multiple of the other's. Compiled steps need a"
        " multiple of 4.",
        number(1, 4096),
    )
    prefix_cache: bool = setting(
        True, "Keep the pages of ended sequences while there is space, for those that begin alike.", SWITCH
    )
    kv_events_endpoint: str = setting(
        "",
        "ZMQ address at which changes of the prefix cache are published in vLLM's format, such as tcp://*:5557"
        " (bound) or tcp://indexer:5557 (connected to); empty: nowhere. Of a process that serves both sides,"
        " the prefill side's.",
        ZMQ_ADDRESS,
    )
    kv_events_replay_endpoint: str = setting(
        "", "ZMQ address at which earlier batches of KV events are asked for; empty: nowhere.", ZMQ_ADDRESS
    )
    kv_events_topic: str = setting(
        "", "Topic of published KV events, such as kv@ADDRESS@MODEL, by which a subscriber knows them.", TEXT
    )
    kv_checksum: str = setting(
        KvChecksum.RECORD.value,
        "What is checked of a hand-over, the same on every worker: the metadata record's checksum, with pages"
        " also the contents of the KV pages, or neither.",
        CHECKSUM,
    )
    max_rooms: int = setting(
        256, "Most rooms held at once, waiting ones included.", number(1, ROOMS_MAX - CANARY_ROOMS)
    )
    orphan_ms: int = setting(
        10_000,
        "How long a room goes on after its bootstrap's connection broke, so that another one may adopt it (0:"
        " it ends at once).",
        optional(DURATION_MS, 0),
    )
    threads: int = setting(0, "Compute threads (0: as many as the cores it may use).", number(0, 4096))
    cpus: tuple[int, ...] = setting((), "Cores to run on, such as 0,2-3 (not given: all).", CPUS)
    transfer_window: int = setting(8 * 2**20, "Most bytes of KV posted to a peer in one write.", SIZE)
    tp: int = setting(1, "Tensor parallel: ranks that share the heads of every layer.", PARALLEL)
    rank: int | None = setting(
        None, "Be this rank of the worker (not given: start all ranks on this machine).", RANK
    )
    world: int = setting(
        0, "Ranks of the worker, checked against the others (0: not checked).", number(0, RANKS_MAX)
    )
    rendezvous: str = setting(
        "", "Where the ranks of the worker meet: rank 0 listens there. With --rank or --machine.", RENDEZVOUS
    )
    machines: int = setting(
        1, "Machines that share the worker's ranks, equally many each, neighbours together.", PARALLEL
    )
    machine: int | None = setting(
        None, "Start the ranks of this one of --machines, the first of which is 0.", RANK
    )
    group_timeout_ms: int = setting(
        30_000, "Longest that the ranks of a worker wait for one of them before they all end.", DURATION_MS
    )
    exit_digest: str = setting(
        "",
        "SHA-256, in hexadecimal, of a secret that the starter of this process drew for this start. It shows"
        " that to report the exit. `baton serve` and the launcher of a group give one.",
        EXIT_DIGEST,
        secret=True,
    )
    exit_file: str = setting(
        "",
        "File on a disk of this host that the worker locks as long as it lives, so that the next one that is"
        " started with it can report this one's exit. For platforms, which report none.",
        TEXT,
    )
    meet_timeout_ms: int = setting(
        120_000,
        "Longest that a rank waits for the others to come at the start: hosts differ in when they begin.",
        DURATION_MS,
    )

    def __post_init__(self) -> None:
        if self.host in WILDCARDS and not self.advertise:
            raise SettingsError(
                f"--advertise is needed with --host {self.host}: peers cannot connect to {self.host}"
            )
        super().__post_init__()
        if not self.advertise:
            object.__setattr__(self, "advertise", self.host)
        self._check_group()
        self._check_exit_file()
        if not self.name:
            host = OUTSIDE_NAMES.sub("-", socket.gethostname())
            object.__setattr__(self, "name", f"{self.role}-{host}"[:NAME_CHARS_MAX])

    @property
    def room_limit(self) -> int:
        """Number of rooms that the worker has memory for, canary rooms included. The worker registers this
        number."""
        return self.max_rooms + CANARY_ROOMS

    @property
    def multiplies_codes(self) -> bool:
        """Whether this worker's steps should multiply by quantized codes directly, which pays only if steps
        are a few tokens wide."""
        return False

    @property
    def draft_model(self) -> DraftModelFiles | None:
        """Model that drafts tokens for speculative decoding, or None."""
        return None

    @property
    def scores_prompts(self) -> bool:
        """Whether a step may compute log-probabilities of a prompt's tokens."""
        return False

    @property
    def topology(self) -> Topology:
        """Number of ranks in each parallel dimension."""
        return Topology(tensor=self.tp)

    @property
    def grouped(self) -> bool:
        """Whether this process is one of several ranks of a worker."""
        return self.rank is not None and self.topology.ranks > 1

    @property
    def launches(self) -> bool:
        """Whether this process only starts the worker's ranks, and is not a rank itself."""
        return self.rank is None and self.topology.ranks > 1

    @property
    def ranks_here(self) -> range:
        """Numbers of the worker's ranks that the launcher on this machine starts, one range of ranks per
        machine."""
        here = self.topology.ranks // self.machines
        return range((self.machine or 0) * here, ((self.machine or 0) + 1) * here)

    @property
    def dimensions(self) -> str:
        """Flags that determine the number of ranks, with their values, for error texts: `--tp 2`."""
        return f"--tp {self.tp}"

    def _check_group(self) -> None:
        """Raise SettingsError if the flags for ranks contradict each other."""
        ranks, flags = self.topology.ranks, self.dimensions
        if ranks > 1 and self.quantize != Quantize.NONE.value:
            raise SettingsError(
                f"--quantize {self.quantize}: the {ranks} ranks of {flags} compute over plain weights; leave"
                " one of them out"
            )
        if self.world and self.world != ranks:
            raise SettingsError(f"--world {self.world} is not what {flags} makes: {ranks}")
        self._check_machines()
        if self.rank is None and self.rendezvous and self.machines == 1:
            raise SettingsError("--rendezvous is for one rank of a worker: give its --rank too")
        if self.rank is not None and self.rank >= ranks:
            raise SettingsError(f"--rank {self.rank}: {flags} makes {ranks}, and the first is 0")
        if self.grouped and not self.rendezvous:
            raise SettingsError(f"--rank {self.rank} of {ranks} needs --rendezvous: where the ranks meet")
        if ranks > 1 and self.group_timeout_ms < GROUP_TIMEOUT_MS_MIN:
            raise SettingsError(
                f"--group-timeout-ms {self.group_timeout_ms}: give {GROUP_TIMEOUT_MS_MIN} at least, since an"
                " idle worker takes a turn each second"
            )
        if self.launches and self.device.startswith("cuda:"):
            raise SettingsError(f"--device {self.device} is one device for {ranks} ranks: give cuda or auto")

    def _check_exit_file(self) -> None:
        """Raise SettingsError if other flags contradict `--exit-file`."""
        if self.exit_file and self.machines > 1:
            raise SettingsError("--exit-file: the ranks of other machines may outlive these; leave it out")
        if self.exit_file and self.exit_digest and not self.grouped:
            raise SettingsError(
                f"--exit-file {self.exit_file}: with BATON_EXIT_DIGEST its starter reports the exit; give one"
            )

    def _check_machines(self) -> None:
        """Raise SettingsError if the flags for a worker on several machines contradict each other."""
        ranks, machines, machine = self.topology.ranks, self.machines, self.machine
        if ranks % machines:
            raise SettingsError(
                f"--machines {machines}: {self.dimensions} makes {ranks}, which is no multiple"
            )
        if machine is not None and machine >= machines:
            raise SettingsError(f"--machine {machine}: there are {machines} (--machines), and the first is 0")
        if machines > 1 and self.rank is not None:
            raise SettingsError(
                f"--rank {self.rank} is one rank, --machines starts several: give one of them"
            )
        if machines > 1 and machine is None:
            raise SettingsError(f"--machines {machines} needs --machine: which of them this is")
        if machines > 1 and not self.rendezvous:
            raise SettingsError(f"--machines {machines} needs --rendezvous: where the ranks meet")
