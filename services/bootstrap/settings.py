"""What can be set on the bootstrap?"""

from dataclasses import dataclass
from typing import ClassVar

from services.runtime.service_settings import ServiceSettings
from services.runtime.setting_kinds import DURATION_MS, PORT, POSITIVE, SIZE, TEXT
from services.runtime.settings import setting


@dataclass(frozen=True, kw_only=True)
class BootstrapSettings(ServiceSettings):
    """Sizes are bytes, times milliseconds."""

    role: ClassVar[str] = "bootstrap"

    model: str = setting("demo", "A model directory, a GGUF file, or the word demo.", TEXT)
    served_model_name: str = setting("", "Name that clients ask for (not given: the model's own name).", TEXT)
    http_port: int = setting(8000, "Port of the OpenAI HTTP API (0: any free one).", PORT)
    grpc_port: int = setting(8100, "Port that workers register at (0: any free one).", PORT)
    max_queue: int = setting(1024, "Most requests waiting for a pair of workers; more get a 429.", POSITIVE)
    queue_timeout_ms: int = setting(60_000, "Longest wait of a request for a pair of workers.", DURATION_MS)
    request_timeout_ms: int = setting(
        600_000, "Longest that one request may take once it has its workers.", DURATION_MS
    )
    room_attempts: int = setting(
        3, "Most rooms that one request gets: it goes on in a new one when a worker fails it.", POSITIVE
    )
    retry_wait_ms: int = setting(
        15_000,
        "Longest wait of a request whose room failed for a worker to be ready, where none of a side is.",
        DURATION_MS,
    )
    lease_ms: int = setting(3_000, "A worker that is silent for this long is taken for lost.", DURATION_MS)
    rooms_kept: int = setting(1024, "Finished rooms whose timelines are kept.", POSITIVE)
    failed_rooms_kept: int = setting(4096, "Failed rooms whose timelines are kept.", POSITIVE)
    body_limit: int = setting(4 * 2**20, "Largest request body.", SIZE)
