"""One inference request, and the rule for when it is answered.

A request is self-contained. The router resolves every default (limits, seed, end-of-sequence ids) at intake.
So any worker, and any later attempt on another pair, computes the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, NamedTuple

from baton.rooms.trace import TraceContext

LOGPROBS_MAX: Final = 2**18
"""Most alternatives per token: all of any known vocabulary. If the first token has more than a metadata
record holds, prefill reports them (`record-fits`)."""
LOGPROB_TOKEN_IDS_MAX: Final = 128
"""Most token ids of a caller whose log-probabilities are reported with each drawn token, as in vLLM."""
SCORES_MAX: Final = 2**17
"""Most log-probabilities reported of one prompt: of its tokens and their alternatives."""

STOP_TOKEN_IDS_MAX: Final = 64
"""Most stop token ids of a request."""
EOS_TOKEN_IDS_MAX: Final = 1024
"""Most end-of-sequence ids of a model. Some models name every reserved token. The ids are sent with each
request, and a whole vocabulary would leave no token to draw."""
LOGIT_BIAS_MAX: Final = 1024
CHOICES_MAX: Final = 128
"""Most choices of one request, as in OpenAI's API."""
GRAMMAR_BYTES_MAX: Final = 128 * 2**10
"""Most bytes of a grammar's text, which is sent with each room."""
SALT_BYTES: Final = 16
"""Bytes of a salt: enough that no other text is found with the same one."""


class FinishReason(Enum):
    """Reason that a sequence ended for, as in OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"


class GrammarKind(Enum):
    """Language of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """llguidance's Lark dialect. It may embed the other two: tool calls are such grammars, and schemas that
    begin after other text."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint on the output, by its source. Each worker that draws compiles it. What it allows at a
    position depends on the grammar and on the output before alone (`mask-is-fold`)."""

    kind: GrammarKind
    text: str
    """At most GRAMMAR_BYTES_MAX bytes of UTF-8."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. Defaults are OpenAI's, and `temperature=0` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Over prompt and output tokens, multiplicative (transformers' definition)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both over output tokens only, additive (OpenAI's definition)."""
    seed: int = 0
    """64 bits, resolved at intake. The draw at output position i depends on (seed, i) alone."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    """Number of alternatives to report besides the chosen token. 0: only the chosen token's log-probability.
    None: no log-probabilities."""
    logprob_token_ids: tuple[int, ...] = ()
    """Token ids whose log-probabilities are reported after the likeliest, if any are reported."""

    def tops(self, vocabulary: int) -> int | None:
        """Return how many alternatives are reported per token. None if no log-probability is."""
        if self.top_logprobs is None:
            return None
        return min(self.top_logprobs, vocabulary) + len(self.logprob_token_ids)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue, or several with a common beginning. Immutable, with every field resolved."""

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
    """Tokens drawn by earlier rooms of the request. They count as output in every respect (penalties, seeds,
    limits, positions), but do not answer the request."""
    trace: TraceContext | None = None
    """Parent span of the workers' spans."""
    grammar: Grammar | None = None
    """Constraint on all of the output but the token that ends it. It takes precedence: `min_tokens` and
    `ignore_eos` delay the end only while it allows any other token."""
    further_seeds: tuple[int, ...] = ()
    """Seeds of the further choices, 64 bits each. All choices share prompt and output, and each ends by
    itself. Fewer than CHOICES_MAX."""
    salt: int = 0
    """Salt of SALT_BYTES bytes as a number. KV is shared only between requests of the same salt
    (`same-root-only`). Its meaning cannot be read from it. 0: none."""
    prompt_logprobs: int | None = None
    """Number of alternatives to report per prompt token, with its own log-probability. Prefill takes no
    prefix from its cache then. None: the prompt is not scored."""
    priority: int = 0
    """Priority class. The lowest is served first, and within a class the first that came."""
    arrived_ms: int = 0
    """Arrival by the router's wall clock, equal in all rooms of the request, so that a retracted request does
    not become the youngest (`oldest-goes-on`)."""
    carried_tokens_max: int = 0
    """Most tokens, prompt and output, that another room may go on from: what prefill workers hold, and decode
    workers that compute prompts. A longer room is retracted only if no other is left. 0: any number."""
    speculates: bool = True
    """Whether drafted tokens may be checked, if its worker does so. The output is the same."""
    tenant: bytes = b""
    """Tenant whose share pays for it while it waits. Its meaning cannot be read from it, and workers do not
    get it."""

    @property
    def names(self) -> dict[str, str]:
        """Ids of the request, for logs."""
        names = {"request_id": self.request_id}
        return names if self.trace is None else names | {"trace_id": self.trace.trace_id}

    @property
    def choices(self) -> int:
        """Number of sequences that continue prompt and output."""
        return 1 + len(self.further_seeds)

    def choice(self, place: int) -> "Request":
        """Return choice number `place`, from 0 on, as a request of its own, which draws the same tokens
        (`own-draws`)."""
        if place == 0 and not self.further_seeds:
            return self
        seed = (self.sampling.seed, *self.further_seeds)[place]
        return replace(self, sampling=replace(self.sampling, seed=seed), further_seeds=())

    @property
    def scores(self) -> int:
        """Number of prompt tokens that are scored: all but the first, or none."""
        return 0 if self.prompt_logprobs is None else len(self.prompt) - 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output so far, whose KV the sender provides."""
        return self.prompt + self.output

    @property
    def prefill_tokens(self) -> int:
        """Number of tokens that prefill computes: the prompt, and the output of earlier rooms."""
        return len(self.prompt) + len(self.output)

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """Token ids that end the sequence."""
        if self.ignore_eos and self.grammar is None:
            return self.stop_token_ids
        return self.eos_token_ids + self.stop_token_ids

    @property
    def tokens_max(self) -> int:
        """Most KV positions of one choice. The last token's KV is never needed."""
        return len(self.prompt) + self.max_tokens - 1

    def finish_reason(self, output: Sequence[int]) -> FinishReason | None:
        """Return why `output`, all tokens so far, answers the request, or None. Its last token decides."""
        may_end = len(output) >= self.min_tokens or self.grammar is not None
        if may_end and output and output[-1] in self.ending_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output) >= self.max_tokens else None


class Score(NamedTuple):
    """Log-probability of one prompt token, given those before it."""

    logprob: float
    """Natural log of the model's own probability."""
    rank: int
    """Number of tokens that were at least as likely, itself included."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens at its position, likeliest first; as many as
    `Request.prompt_logprobs`."""


class Token(NamedTuple):
    """One drawn token, with its log-probability and those of alternatives if the request wants them. A tuple,
    which is cheap to make for each token."""

    id: int
    logprob: float | None = None
    """Natural log of the model's own probability, before penalties, bias and temperature."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of alternatives, likeliest first; as many as `Sampling.top_logprobs`. Those of
    `Sampling.logprob_token_ids` follow in their order."""
