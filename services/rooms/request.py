"""One inference request, and the rule that decides when it is answered.

A request is self-contained. The router resolves every default (limits, seed, end-of-sequence ids) when the
request arrives. So any worker, and any later room on another pair of workers, computes the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, NamedTuple

from baton.rooms.trace import TraceContext

LOGPROBS_MAX: Final = 2**18
"""Most alternative tokens with log-probabilities for each output token: more than any known vocabulary has.
If the first token has more alternatives than a metadata record holds, prefill reports them
(`record-fits`)."""
LOGPROB_TOKEN_IDS_MAX: Final = 128
"""Most token ids that a request may name to get their log-probabilities at each output token, as in vLLM."""
SCORES_MAX: Final = 2**17
"""Most log-probabilities that are reported for one prompt, over all of its tokens and their alternatives."""

STOP_TOKEN_IDS_MAX: Final = 64
"""Most stop token ids of a request."""
EOS_TOKEN_IDS_MAX: Final = 1024
"""Most end-of-sequence token ids of a model. Some models name every reserved token. The ids are sent with
each request, and a whole vocabulary would leave no token to draw."""
LOGIT_BIAS_MAX: Final = 1024
CHOICES_MAX: Final = 128
"""Most choices of one request, as in OpenAI's API."""
GRAMMAR_BYTES_MAX: Final = 128 * 2**10
"""Longest text of a grammar, in bytes. The text is sent with each room."""


class FinishReason(Enum):
    """Reason for which a sequence ended, as in OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"


class GrammarKind(Enum):
    """Language in which a grammar is written, such as JSON schema or a regular expression."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """Lark dialect of llguidance. It may embed JSON schemas and regular expressions, and is used for tool
    calls and for schemas that begin after other text."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that constrains the output, as source text. Each worker that samples tokens compiles it. Which
    tokens it allows at a position depends on the grammar and on the earlier output alone (`mask-is-fold`)."""

    kind: GrammarKind
    text: str
    """Source text of the grammar, at most GRAMMAR_BYTES_MAX bytes of UTF-8."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request. The defaults are OpenAI's, and `temperature=0` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Least probability of a token that may be sampled, as a share of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Multiplicative penalty on tokens of the prompt and the output, as transformers defines it."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Additive penalty for each earlier occurrence of a token in the output, as OpenAI defines it. Like
    `presence_penalty`, it ignores the prompt."""
    seed: int = 0
    """Random seed of 64 bits, chosen by the router if the client gave none. The token sampled at output
    position i depends on (seed, i) alone."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    """Number of alternative tokens to report with each output token. With 0, only the sampled token's
    log-probability is reported; with None, no log-probabilities are."""
    logprob_token_ids: tuple[int, ...] = ()
    """Token ids whose log-probabilities are reported in addition to the likeliest tokens, if any
    log-probabilities are."""

    def tops(self, vocabulary: int) -> int | None:
        """Return the number of alternative tokens that are reported with each output token. None if no
        log-probabilities are reported."""
        if self.top_logprobs is None:
            return None
        return min(self.top_logprobs, vocabulary) + len(self.logprob_token_ids)


@dataclass(frozen=True, slots=True)
class Request:
    """Inference request: one sequence to continue, or several with a common beginning. It is immutable, and
    every default is resolved."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    """Largest number of output tokens, at least 1."""
    min_tokens: int = 0
    """Least number of output tokens. Before that, end-of-sequence and stop token ids are not sampled."""
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    output: tuple[int, ...] = ()
    """Tokens sampled by earlier rooms of the same request. They count as output for penalties, seeds, limits
    and positions, but do not complete the answer."""
    trace: TraceContext | None = None
    """Trace context of the caller. Its span is the parent of the workers' spans."""
    grammar: Grammar | None = None
    """Grammar that constrains all output tokens except the one that ends the output.

    It takes precedence: `min_tokens` and `ignore_eos` delay the end only while the grammar allows another
    token.
    """
    further_seeds: tuple[int, ...] = ()
    """Random seeds of the choices after the first, 64 bits each; fewer than CHOICES_MAX. All choices share
    prompt and output, and each ends by itself."""
    salt: int = 0
    """Salt of the prefix cache, as a number of SALT_BYTES bytes; 0 for none. KV is shared only between
    requests of the same salt (`same-root-only`). The text that it is derived from cannot be read from it."""
    prompt_logprobs: int | None = None
    """Number of alternatives to report with the log-probability of each prompt token. None if the prompt is
    not scored. Prefill computes a scored prompt without its prefix cache."""
    priority: int = 0
    """Priority class. The lowest number is served first, and within a class the request that arrived
    first."""
    arrived_ms: int = 0
    """Arrival time by the router's wall clock, in milliseconds. It is the same in all rooms of the request,
    so that a retracted request does not become the youngest (`oldest-goes-on`)."""
    carried_tokens_max: int = 0
    """Most tokens, prompt and output together, with which another room could continue the request; 0 for any
    number.

    Some worker has to compute them again: a prefill worker, or a decode worker that computes prompts. A room
    with more tokens is retracted only if no other room is left to retract.
    """
    speculates: bool = True
    """Whether the worker may use speculative decoding (check draft tokens) for this request. The output is
    the same."""
    tenant: bytes = b""
    """Tenant (a group of clients) whose share of the queue this request uses while it waits. Workers do not
    get it."""

    resumes: bool = False
    """Whether a client continues a stream that broke, so that another router's room may compute the answer
    already. Workers do not get it."""

    @property
    def names(self) -> dict[str, str]:
        """Request id and trace id of the request, by the name of their field in log lines."""
        names = {"request_id": self.request_id}
        return names if self.trace is None else names | {"trace_id": self.trace.trace_id}

    @property
    def is_replayable(self) -> bool:
        """Whether the token ids of the output are all that its reader gets. Log-probabilities are not stored
        after they were sent."""
        return self.sampling.top_logprobs is None and self.prompt_logprobs is None

    @property
    def choices(self) -> int:
        """Number of sequences that continue the same prompt and output."""
        return 1 + len(self.further_seeds)

    def choice(self, place: int) -> "Request":
        """Return choice number `place` (from 0) as a request of its own, which samples the same tokens as in
        this request (`own-draws`)."""
        if place == 0 and not self.further_seeds:
            return self
        seed = (self.sampling.seed, *self.further_seeds)[place]
        return replace(self, sampling=replace(self.sampling, seed=seed), further_seeds=())

    @property
    def scores(self) -> int:
        """Number of prompt tokens whose log-probabilities are computed: all except the first, or 0 if the
        prompt is not scored."""
        return 0 if self.prompt_logprobs is None else len(self.prompt) - 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the prompt and of earlier rooms' output. Prefill computes their KV."""
        return self.prompt + self.output

    @property
    def prefill_tokens(self) -> int:
        """Number of tokens whose KV prefill computes: those of the prompt and of earlier rooms' output."""
        return len(self.prompt) + len(self.output)

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """Ids of all tokens that end the output when they are sampled. They include end-of-sequence ids
        unless the request ignores those."""
        if self.ignore_eos and self.grammar is None:
            return self.stop_token_ids
        return self.eos_token_ids + self.stop_token_ids

    @property
    def tokens_max(self) -> int:
        """Most KV positions that one choice takes. The KV of the last token is never needed."""
        return len(self.prompt) + self.max_tokens - 1

    def finish_reason(self, output: Sequence[int]) -> FinishReason | None:
        """Return why `output`, which has all tokens so far, is complete. Return None if it is not. The last
        token decides."""
        may_end = len(output) >= self.min_tokens or self.grammar is not None
        if may_end and output and output[-1] in self.ending_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output) >= self.max_tokens else None


class Score(NamedTuple):
    """Log-probability of one prompt token, given the tokens before it."""

    logprob: float
    """Log-probability of the prompt token: the natural log of the model's own probability."""
    rank: int
    """Number of tokens that were at least as likely as this prompt token, itself included."""
    top: tuple[tuple[int, float], ...] = ()
    """Likeliest tokens at the prompt token's position as (token id, logprob), likeliest first. As many as
    `Request.prompt_logprobs`."""


class Token(NamedTuple):
    """One sampled token, with log-probabilities if the request asks for them. It is a tuple, which is cheap
    to create for each token."""

    id: int
    logprob: float | None = None
    """Log-probability of the sampled token: the natural log of the model's own probability, before penalties,
    bias and temperature."""
    top: tuple[tuple[int, float], ...] = ()
    """Alternative tokens as (token id, logprob), likeliest first, as many as `Sampling.top_logprobs`. The
    tokens of `Sampling.logprob_token_ids` follow in their order."""


class TokenBatch(NamedTuple):
    """Consecutive output tokens of one choice, in at most one batch per engine step. The last batch of a
    choice has a `finish`."""

    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
    choice: int = 0
    """Index of the choice to which the tokens belong, among the choices of the request."""
    scores: tuple[Score, ...] = ()
    """Log-probabilities of the prompt's tokens, from the second token on, if the request asks for them. All
    of them come with the first output token."""
