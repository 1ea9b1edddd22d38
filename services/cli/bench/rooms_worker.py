"""A worker as in production, but for its engine: steps cost nothing, a token is the last one plus 1."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

from services.engine.engine import Row, SumPart, TorchEngine
from services.pages.layout import KvLayout
from services.rooms.request import Token
from services.runtime.host_memory import HostMemory
from services.runtime.worker_settings import WorkerSettings

MODEL: Final = "toy"
VOCABULARY: Final = 50_000
CONTEXT: Final = 8_192
LAYOUT: Final = KvLayout(MODEL, "bfloat16", 16, (0, 1), (0,), 64)
PAGES: Final = 4_096


class _Pages(HostMemory):
    pages = PAGES


class ToyEngine:
    """What a worker asks of `services.engine.engine.TorchEngine`."""

    grammars = None
    scored_max = 0

    def __init__(self) -> None:
        self.layout = self.whole = LAYOUT
        self.cache = _Pages(PAGES * LAYOUT.page_bytes)
        self.model = SimpleNamespace(
            vocab_size=VOCABULARY, facts=SimpleNamespace(context_length=CONTEXT, fingerprint=MODEL)
        )

    def step(self, rows: Sequence[Row]) -> list[Token | None]:
        return [self._drawn(row) if row.sample else None for row in rows]

    def sum_pages(self, parts: Sequence[SumPart]) -> None:  # noqa: ARG002
        raise AssertionError("no sums are asked for")

    def _drawn(self, row: Row) -> Token:
        last = row.sequence.tokens(row.stop - 1, row.stop)[0]
        return Token((last + 1) % VOCABULARY)


def live(side: str, bootstrap: str, metrics_port: int) -> None:
    """Until the process is ended."""
    common: dict[str, Any] = {
        "name": f"{side}-bench",
        "bootstrap": bootstrap,
        "metrics_port": metrics_port,
        "model": MODEL,
        "log_level": "warning",
    }
    if side == "prefill":
        from services.prefill import wiring as prefill
        from services.prefill.settings import PrefillSettings

        prefill.run(PrefillSettings(**common), load=_toy)
    else:
        from services.decode import wiring as decode
        from services.decode.settings import DecodeSettings

        decode.run(DecodeSettings(**common), load=_toy)


def _toy(settings: WorkerSettings, threads: int) -> TorchEngine:  # noqa: ARG001
    return cast(TorchEngine, ToyEngine())
