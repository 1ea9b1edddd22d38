"""What does one request ask for, and when has it been answered?

The request is self-contained: the bootstrap resolves every default (limits, seed, end-of-sequence
ids) at intake, so that any worker, and any later attempt on another pair, computes the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, NamedTuple

from baton.rooms.trace import TraceContext

LOGPROBS_MAX: Final = 2**18
"""Most alternatives told of one token: all of any vocabulary that is known. What a metadata record cannot
hold of the first token's, prefill alone tells (`record-fits`)."""
LOGPROB_TOKEN_IDS_MAX: Final = 128
"""Of a caller's own, whose log-probabilities are told beside each drawn token's: vLLM's."""
SCORES_MAX: Final = 2**17
"""Most log-probabilities that are told of one prompt: of its tokens, and of their alternatives."""

STOP_TOKEN_IDS_MAX: Final = 64
"""Of a caller's own."""
EOS_TOKEN_IDS_MAX: Final = 1024
"""Of a model's: some name every reserved token. It is sent with each request, and all of a vocabulary would
leave nothing to draw."""
LOGIT_BIAS_MAX: Final = 1024
CHOICES_MAX: Final = 128
"""Of one request: as many as OpenAI takes."""
GRAMMAR_BYTES_MAX: Final = 128 * 2**10
"""Of a grammar's text: it is sent with each room."""
SALT_BYTES: Final = 16
"""Of a salt: enough that nobody finds another text with the same one."""


class FinishReason(Enum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class GrammarKind(Enum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """Of llguidance, which may hold the other two: a tool's call is one, and so is a schema that begins
    behind something else."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output is held to, by its source: whoever draws compiles it. What it allows at a position
    follows from it and from the output before alone (`mask-is-fold`)."""

    kind: GrammarKind
    text: str
    """At most GRAMMAR_BYTES_MAX bytes of UTF-8."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Defaults are OpenAI's; `temperature=0` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one."""
    repetition_penalty: float = 1.0
    """Over prompt and output tokens, multiplicative (transformers' definition)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both over output tokens only, additive (OpenAI's definition)."""
    seed: int = 0
    """64 bits, resolved at intake. The draw at output position i depends on (seed, i) alone."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    """None: no logprobs; 0: the chosen token's only; n: the n likeliest beside it."""
    logprob_token_ids: tuple[int, ...] = ()
    """Of these the log-probability is told, too, behind the likeliest, where any is told."""

    def tops(self, vocabulary: int) -> int | None:
        """How many alternatives are told of each token; None where no log-probability is."""
        if self.top_logprobs is None:
            return None
        return min(self.top_logprobs, vocabulary) + len(self.logprob_token_ids)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue, or several that begin alike. Immutable; every field is resolved."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    """Most output tokens, >= 1."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are not sampled before this many output tokens."""
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    output: tuple[int, ...] = ()
    """Drawn by an earlier room of the same request, which failed: this one goes on behind them. They count
    as output in every respect (penalties, seeds, limits, positions), and do not answer the request."""
    trace: TraceContext | None = None
    """What the spans of whoever serves it are children of."""
    grammar: Grammar | None = None
    """All of the output is held to it, but for the token that ends it. It wins: `min_tokens` and `ignore_eos`
    put the end off only as long as it allows anything else."""
    further_seeds: tuple[int, ...] = ()
    """Of the choices beside the first, each 64 bits: all go on behind the same prompt and output, and each
    ends by itself. Fewer than CHOICES_MAX."""
    salt: int = 0
    """A number of SALT_BYTES: its tokens' KV is shared with requests of the same salt alone
    (`same-root-only`). What it stands for is not to be read from it. 0: none."""
    prompt_logprobs: int | None = None
    """The prompt's tokens are scored: prefill tells how likely each was after those before it, and so many of
    the likeliest in its place. It takes no prefix from its cache for that. None: they are not."""
    priority: int = 0
    """Of those that wait, the lowest is served first, and of equals whoever came first."""
    arrived_ms: int = 0
    """When it came, by the bootstrap's wall clock: the same in each of its rooms, so that a retracted request
    does not become the youngest (`oldest-goes-on`)."""
    carried_tokens_max: int = 0
    """Most tokens, prompt and output, behind which another room may go on: what prefill workers hold, and
    decode workers that compute prompts. A room with more is retracted only where no other is left. 0: any
    number."""
    speculates: bool = True
    """Drafts of what comes next may be checked, where its worker does that. What is drawn is the same."""
    tenant: bytes = b""
    """In whose share it is served while it waits. What it stands for is not to be read from it, and no worker
    is told."""

    @property
    def names(self) -> dict[str, str]:
        """What it is known by, for people."""
        names = {"request_id": self.request_id}
        return names if self.trace is None else names | {"trace_id": self.trace.trace_id}

    @property
    def choices(self) -> int:
        """How many sequences go on behind prompt and output."""
        return 1 + len(self.further_seeds)

    def choice(self, place: int) -> "Request":
        """Choice `place`, from 0 on, as a request of its own: what it draws is what that would
        (`own-draws`)."""
        if place == 0 and not self.further_seeds:
            return self
        seed = (self.sampling.seed, *self.further_seeds)[place]
        return replace(self, sampling=replace(self.sampling, seed=seed), further_seeds=())

    @property
    def scores(self) -> int:
        """How many of the prompt's tokens are scored: all but the first, or none."""
        return 0 if self.prompt_logprobs is None else len(self.prompt) - 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that it goes on behind, whose KV a sender answers for."""
        return self.prompt + self.output

    @property
    def prefill_tokens(self) -> int:
        """How many tokens the prefill worker computes: the prompt, and what was drawn by an earlier room."""
        return len(self.prompt) + len(self.output)

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """The ids whose appearance ends the sequence."""
        if self.ignore_eos and self.grammar is None:
            return self.stop_token_ids
        return self.eos_token_ids + self.stop_token_ids

    @property
    def tokens_max(self) -> int:
        """Most KV positions one choice can ever occupy (the last token's KV is never needed)."""
        return len(self.prompt) + self.max_tokens - 1

    def finish_reason(self, output: Sequence[int]) -> FinishReason | None:
        """Whether `output`, all tokens drawn so far, answers the request, judged by its last token."""
        may_end = len(output) >= self.min_tokens or self.grammar is not None
        if may_end and output and output[-1] in self.ending_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output) >= self.max_tokens else None


class Score(NamedTuple):
    """How likely the model found one token of a prompt, after those before it."""

    logprob: float
    """Natural log, of the raw model distribution."""
    rank: int
    """How many tokens were as likely at least, itself included."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest in its place, from above; as many as `Request.prompt_logprobs`."""


class Token(NamedTuple):
    """One drawn token and, if asked for, how likely it and its likeliest alternatives were. A tuple: each
    token of each answer is one."""

    id: int
    logprob: float | None = None
    """Natural log, of the raw model distribution (before penalties, bias and temperature)."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), likeliest first; as many as `Sampling.top_logprobs` asked for. Behind them those
    of `Sampling.logprob_token_ids`, in their order."""
