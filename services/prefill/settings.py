"""Settings of a prefill worker."""

from dataclasses import dataclass
from typing import ClassVar

from baton.runtime.setting_kinds import DURATION_MS, POSITIVE
from baton.runtime.settings import setting
from baton.runtime.worker_settings import PARALLEL, WorkerSettings
from baton.topology import Topology


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(WorkerSettings):
    """Settings of a prefill worker. Sizes are in bytes, times in milliseconds."""

    role: ClassVar[str] = "prefill"

    pp: int = setting(1, "Pipeline parallel: ranks that share the layers.", PARALLEL)
    chunk_tokens: int = setting(512, "Most prompt tokens computed in one step.", POSITIVE)
    bootstrap_timeout_ms: int = setting(
        180_000,
        "Longest that a room waits here for its destination, where its opener did not say how long the"
        " request may take. The bootstrap says it.",
        DURATION_MS,
    )
    waiting_timeout_ms: int = setting(
        120_000,
        "Longest that a room with a destination waits to be computed; bounds the rooms that"
        " --bootstrap-timeout-ms does.",
        DURATION_MS,
    )
    transfer_timeout_ms: int = setting(
        30_000, "Longest without progress while a room is computed and written.", DURATION_MS
    )

    @property
    def topology(self) -> Topology:
        return Topology(tensor=self.tp, pipeline=self.pp)

    @property
    def scores_prompts(self) -> bool:
        return True

    @property
    def dimensions(self) -> str:
        return f"--tp {self.tp} --pp {self.pp}"
