"""A worker as in production with a toy engine, whose next token is the last one plus 1."""

from collections.abc import Sequence
from typing import Any, Final

from baton.engine_interface import EngineFacts, PageSumRequest, Row, RowResult
from baton.engine_interface import Sequence as TokenSequence
from baton.pages.layout import KvLayout, full_group
from baton.rooms.request import Token
from baton.runtime.host_memory import HostMemory

MODEL: Final = "toy"
VOCABULARY: Final = 50_000
CONTEXT: Final = 8_192
GROUP: Final = full_group("bfloat16", 16, (0, 1), (0,), 64)
LAYOUT: Final = KvLayout(MODEL, (GROUP,))
PAGES: Final = 4_096


class _Pages(HostMemory):
    pages = PAGES


class ToyEngine:
    """An `Engine` of `services/engine_interface.py`."""

    vocab_size = VOCABULARY
    context_length = CONTEXT
    scored_max = 0
    facts = EngineFacts(MODEL, batch_invariant=True)
    grammars = None
    draft_pages = None

    def __init__(self) -> None:
        self.layout = self.whole = LAYOUT
        self.caches = (_Pages(PAGES * GROUP.page_bytes),)

    def bind_thread(self) -> None: ...

    def step(self, rows: Sequence[Row]) -> list[RowResult]:
        return [(self._drawn(row),) if row.sample else () for row in rows]

    def release(self, sequence: TokenSequence) -> None:
        """Do nothing: nothing is stored by sequence."""

    def sum_pages(self, parts: Sequence[PageSumRequest]) -> None:  # noqa: ARG002
        raise AssertionError("no sums are asked for")

    def _drawn(self, row: Row) -> Token:
        last = row.sequence.tokens(row.stop - 1, row.stop)[0]
        return Token((last + 1) % VOCABULARY)


def live(side: str, bootstrap: str, metrics_port: int) -> None:
    """Run a worker until its process is ended."""
    common: dict[str, Any] = {
        "name": f"{side}-bench",
        "bootstrap": (bootstrap,),
        "metrics_port": metrics_port,
        "model": MODEL,
        "log_level": "warning",
    }
    if side == "prefill":
        from baton.prefill import wiring as prefill
        from baton.prefill.settings import PrefillSettings

        prefill.run(PrefillSettings(**common), lambda *_: ToyEngine())
    else:
        from baton.decode import wiring as decode
        from baton.decode.settings import DecodeSettings

        decode.run(DecodeSettings(**common, local_gap_ms=0), lambda *_: ToyEngine())  # all are handed over
