"""Settings of a decode worker."""

from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, Self

from baton.rooms.steps.draft_budget import DRAFTS_MAX
from baton.rooms.steps.ngram_lookup import LEAST, LONGEST
from baton.runtime.errors import SettingsError
from baton.runtime.model_options import Quantize
from baton.runtime.setting_kinds import DURATION_MS, POSITIVE, SIZE, BadValue, SettingKind, number
from baton.runtime.settings import setting
from baton.runtime.worker_settings import DraftModelFiles, WorkerSettings

LONGEST_MAX: Final = 64


AHEAD: Final = 4
"""Default of the number of tokens that a draft model makes at most for one sequence in a step."""


class Speculation(NamedTuple):
    """Parsed value of `--speculate`: whether draft tokens come from n-gram lookup or a draft model, and how
    many."""

    longest: int = 0
    """Length in tokens of the suffix that n-gram lookup compares. 0: no lookup."""
    model: str = ""
    """Directory with the draft model's files. Empty if there is no draft model."""
    ahead: int = 0
    """Most tokens that the draft model makes for one sequence in a step. 0 without a draft model."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of the flag `--speculate`. Raises BadValue."""
        kind, colon, rest = text.partition(":")
        if kind == "model" and rest:
            model, _, last = rest.rpartition(":")
            if not (model and last.isdecimal()):
                return cls(model=rest, ahead=AHEAD)
            return cls(model=model, ahead=_within(last, 1, DRAFTS_MAX))
        if kind == "ngram":
            return cls(_within(rest, LEAST, LONGEST_MAX) if colon else LONGEST)
        if text != "none":
            raise BadValue
        return cls()


def _within(text: str, least: int, most: int) -> int:
    number_given = number(0).parse(text)
    if not least <= number_given <= most:
        raise BadValue
    return number_given


def _speculation(text: str) -> str:
    Speculation.parse(text)
    return text


SPECULATION: Final = SettingKind(
    "none|ngram[:N]|model:DIR[:N]",
    f"none, ngram, ngram:N with N from {LEAST} to {LONGEST_MAX}, model:DIR, or model:DIR:N with N from 1 to"
    f" {DRAFTS_MAX}",
    _speculation,
)


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """Settings of a decode worker. Sizes are in bytes, times in milliseconds."""

    role: ClassVar[str] = "decode"

    max_running: int = setting(64, "Most sequences decoded together.", POSITIVE)
    speculate: str = setting(
        "none",
        "Check drafts of what comes next, several tokens in one step. What is drawn is the same. With ngram"
        " they are what followed the longest earlier occurrence of a sequence's last tokens, of which N are"
        f" compared ({LONGEST}). With model they are what the smaller model in DIR draws, of the same"
        f" vocabulary, up to N of a sequence in a step ({AHEAD}). What a grammar forces is checked with"
        " either. A request may refuse drafts (speculate: false).",
        SPECULATION,
    )
    draft_memory: int = setting(
        2**28, "KV pages of the draft model, beside --kv-cache-memory, on the rank that draws.", SIZE
    )
    local_gap_ms: int = setting(
        20,
        "Compute a room's prompt here where that is sooner than prefill's: in parts, each of which holds up"
        " the sequences that run for so long at most (0: only where no prefill worker is there).",
        number(0, 60_000),
    )
    prealloc_timeout_ms: int = setting(
        120_000,
        "Longest that a room waits for free pages, where its opener did not say how long the request may"
        " take. The bootstrap says it.",
        DURATION_MS,
    )
    connect_timeout_ms: int = setting(5_000, "Longest that a prefill may refuse to connect.", DURATION_MS)
    transfer_timeout_ms: int = setting(
        600_000,
        "Longest from the grant of pages until all landed, prefill's queue included; bounds the rooms that"
        " --prealloc-timeout-ms does.",
        DURATION_MS,
    )
    revoke_after_ms: int = setting(
        60_000,
        "How long a sender that does not answer keeps the pages of a failed room before all exposed memory"
        " is taken back; a tenth of it when half of all pages are kept so, or the oldest room that runs lacks"
        " pages.",
        DURATION_MS,
    )

    @property
    def speculation(self) -> Speculation:
        return Speculation.parse(self.speculate)

    @property
    def draft_model(self) -> DraftModelFiles | None:
        model = self.speculation.model
        return DraftModelFiles(model, self.draft_memory) if model else None

    @property
    def multiplies_codes(self) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantize != Quantize.NONE.value and not self.compiled_steps:
            raise SettingsError(
                f"--quantize {self.quantize}: codes are multiplied by compiled steps alone: leave out"
                " --compiled-steps false"
            )
