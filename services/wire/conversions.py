"""Conversions between protobuf messages and the core's types for requests, tokens, causes and peers.

Reading checks what protobuf's types cannot: that enums are set, and numbers in range. A message that fails a
check raises `Malformed`, which ends at most its own call (`malformed-is-contained`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import inf, isfinite
from typing import Final, cast

from baton.ids import SALT_BYTES, PageId, PageTables, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.request import (
    CHOICES_MAX,
    EOS_TOKEN_IDS_MAX,
    GRAMMAR_BYTES_MAX,
    LOGIT_BIAS_MAX,
    LOGPROB_TOKEN_IDS_MAX,
    LOGPROBS_MAX,
    SCORES_MAX,
    STOP_TOKEN_IDS_MAX,
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    Sampling,
    Score,
    Token,
)
from baton.rooms.trace import read_trace
from baton.rooms.worker_facts import WorkerFacts
from baton.wire.baton.v1 import inference_pb2, rooms_pb2
from baton.wire.malformed import Malformed as Malformed
from baton.wire.receiver_secret import DIGEST_BYTES
from baton.wire.text_validation import (
    address_from_wire,
    name_from_wire,
    request_id_from_wire,
    shown_from_wire,
)

TEXT_CHARS_MAX: Final = 1024
"""Longest text of a room's cause of failure in a message, in characters. The rest is cut."""
TIME_LEFT_MS_MAX: Final = 2**32 - 1
"""Longest remaining time of a request in a message, in milliseconds (seven weeks). Longer times are sent as
this."""

TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-5, 100
PENALTY_MAX: Final = 100
BIAS_MAX: Final = 1000
"""Largest absolute logit bias in a request. The bounds on sampling parameters exceed what the HTTP API
accepts, and keep sampling in the range of float32."""

SCORES_A_MESSAGE: Final = 2**12
"""Number of log-probabilities of prompt tokens that fit into one message."""
SCORE_MESSAGES_MAX: Final = 2 * (SCORES_MAX // SCORES_A_MESSAGE) + 1


_SIDES: Final = {Side.PREFILL: rooms_pb2.SIDE_PREFILL, Side.DECODE: rooms_pb2.SIDE_DECODE}
_FINISHES: Final = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
_new_token: Final = partial(tuple.__new__, Token)
"""Constructor of a token from a tuple of its fields. It costs half as much as the class itself."""
_FINISHED: Final = {int(value): finish for finish, value in _FINISHES.items()}
_RANGES: Final[Sequence[tuple[str, Callable[[float], bool], str]]] = (
    (
        "temperature",
        lambda value: value == 0 or TEMPERATURE_MIN <= value <= TEMPERATURE_MAX,
        f"0, or from {TEMPERATURE_MIN} to {TEMPERATURE_MAX}",
    ),
    ("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("min_p", lambda value: 0 <= value <= 1, "from 0 to 1"),
    (
        "repetition_penalty",
        lambda value: 1 / PENALTY_MAX <= value <= PENALTY_MAX,
        f"from {1 / PENALTY_MAX} to {PENALTY_MAX}",
    ),
    ("presence_penalty", lambda value: abs(value) <= PENALTY_MAX, f"from -{PENALTY_MAX} to {PENALTY_MAX}"),
    ("frequency_penalty", lambda value: abs(value) <= PENALTY_MAX, f"from -{PENALTY_MAX} to {PENALTY_MAX}"),
)
"""Range check of each sampling parameter: field name, test that a value has to pass, and the allowed range as
error texts state it."""


def request_to_wire(request: Request, left_s: float | None = None) -> inference_pb2.InferenceRequest:
    """Convert a request to its message. `left_s`: time that the request may still take, in
    seconds, if known."""
    sampling = request.sampling
    return inference_pb2.InferenceRequest(
        request_id=request.request_id,
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        eos_token_ids=request.eos_token_ids,
        stop_token_ids=request.stop_token_ids or None,  # None costs less than an empty list
        ignore_eos=request.ignore_eos,
        output=request.output or None,
        traceparent="" if request.trace is None else request.trace.parent,
        tracestate="" if request.trace is None else request.trace.state,
        time_left_ms=None if left_s is None else min(max(int(left_s * 1000), 1), TIME_LEFT_MS_MAX),
        sampling=inference_pb2.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logit_bias=dict(sampling.logit_bias) or None,
            top_logprobs=sampling.top_logprobs,
            logprob_token_ids=sampling.logprob_token_ids or None,
        ),
        grammar=None if request.grammar is None else _grammar_to_wire(request.grammar),
        further_seeds=request.further_seeds or None,
        cache_salt=request.salt.to_bytes(SALT_BYTES, "big") if request.salt else b"",
        prompt_logprobs=request.prompt_logprobs,
        priority=request.priority,
        arrived_ms=request.arrived_ms,
        carried_tokens_max=request.carried_tokens_max,
        unspeculated=not request.speculates,
    )


def request_from_wire(wire: inference_pb2.InferenceRequest) -> Request:
    """Convert a message to a request. Raises Malformed, which names the invalid field."""
    if not wire.prompt:
        raise Malformed("request.prompt is empty")
    if wire.max_tokens < 1:
        raise Malformed("request.max_tokens must be at least 1")
    if wire.min_tokens > wire.max_tokens:
        raise Malformed("request.min_tokens is larger than request.max_tokens")
    for name, most in (("eos_token_ids", EOS_TOKEN_IDS_MAX), ("stop_token_ids", STOP_TOKEN_IDS_MAX)):
        if len(getattr(wire, name)) > most:
            raise Malformed(f"request.{name} has more than {most} ids")
    if len(wire.further_seeds) >= CHOICES_MAX:
        raise Malformed(f"request.further_seeds are of more than {CHOICES_MAX} choices")
    if len(wire.cache_salt) not in (0, SALT_BYTES):
        raise Malformed(f"request.cache_salt must have {SALT_BYTES} bytes, or none")
    if wire.HasField("prompt_logprobs") and len(wire.prompt) * (1 + wire.prompt_logprobs) > SCORES_MAX:
        raise Malformed(f"request.prompt_logprobs asks for more than {SCORES_MAX} log-probabilities")
    sampling = wire.sampling
    _check_sampling(sampling)
    request = Request(
        request_id=request_id_from_wire(wire.request_id),
        prompt=tuple(wire.prompt),
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        eos_token_ids=tuple(wire.eos_token_ids),
        stop_token_ids=tuple(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logit_bias=tuple(sorted(sampling.logit_bias.items())),
            top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
            logprob_token_ids=tuple(sampling.logprob_token_ids),
        ),
        output=tuple(wire.output),
        trace=read_trace(wire.traceparent, wire.tracestate),
        grammar=_grammar_from_wire(wire.grammar) if wire.HasField("grammar") else None,
        further_seeds=tuple(wire.further_seeds),
        salt=int.from_bytes(wire.cache_salt, "big"),
        prompt_logprobs=wire.prompt_logprobs if wire.HasField("prompt_logprobs") else None,
        priority=wire.priority,
        arrived_ms=wire.arrived_ms,
        carried_tokens_max=wire.carried_tokens_max,
        speculates=not wire.unspeculated,
    )
    if request.finish_reason(request.output) is not None:
        raise Malformed(f"request.output answers the request already, with {len(request.output)} tokens")
    return request


def _grammar_to_wire(grammar: Grammar) -> inference_pb2.Grammar:
    return inference_pb2.Grammar(kind=grammar.kind.value, text=grammar.text)


def _grammar_from_wire(wire: inference_pb2.Grammar) -> Grammar:
    """Convert a message to a grammar. Only its size is checked here. Compiling it shows whether
    it is valid."""
    if len(wire.text.encode()) > GRAMMAR_BYTES_MAX:
        raise Malformed(f"request.grammar has more than {GRAMMAR_BYTES_MAX} bytes")
    try:
        return Grammar(GrammarKind(wire.kind), wire.text)
    except ValueError as error:
        raise Malformed(f"request.grammar.kind has the unknown value {wire.kind!r}") from error


def _check_sampling(sampling: inference_pb2.Sampling) -> None:
    """Check all sampling parameters. Raises Malformed.

    A parameter that cannot be used would fail the step of all requests in the batch. Sampling is in float32,
    where many values that are finite here become infinite or 0.
    """
    for name, holds, allowed in _RANGES:
        value: float = getattr(sampling, name)
        if not isfinite(value):
            raise Malformed(f"request.sampling.{name} is not a finite number")
        if not holds(value):
            raise Malformed(f"request.sampling.{name} must be {allowed}")
    biases = sampling.logit_bias.values()
    if len(biases) > LOGIT_BIAS_MAX or not all(abs(bias) <= BIAS_MAX for bias in biases):
        raise Malformed(
            f"request.sampling.logit_bias takes up to {LOGIT_BIAS_MAX} numbers from -{BIAS_MAX} to {BIAS_MAX}"
        )
    if sampling.top_logprobs > LOGPROBS_MAX:
        raise Malformed(f"request.sampling.top_logprobs must be at most {LOGPROBS_MAX}")
    if len(sampling.logprob_token_ids) > LOGPROB_TOKEN_IDS_MAX:
        raise Malformed(f"request.sampling.logprob_token_ids has more than {LOGPROB_TOKEN_IDS_MAX} ids")


def ends_from_wire(wire: inference_pb2.InferenceRequest, now_ms: int) -> int | None:
    """Return the time at which a request expires, in milliseconds on the clock of `now_ms`.

    None if the caller gave no limit.
    """
    return now_ms + wire.time_left_ms if wire.HasField("time_left_ms") else None


def room_from_wire(room: int) -> RoomId:
    if room < 1:
        raise Malformed("room is not set")
    return RoomId(room)


def check_peer(peer: rooms_pb2.Peer, field: str) -> None:
    """Check the peer worker that a message names. Raises Malformed if it lacks a name, incarnation or
    address.

    Raises Malformed also if the name, the address or the digest is not allowed. `field`: the peer's path in
    the message.
    """
    if not (peer.name and peer.incarnation and peer.address):
        raise Malformed(f"{field} needs a name, an incarnation and an address")
    name_from_wire(peer.name, f"{field}.name")
    address_from_wire(peer.address, f"{field}.address")
    if len(peer.secret_digest) not in (0, DIGEST_BYTES):
        raise Malformed(f"{field} has a digest of {len(peer.secret_digest)} bytes, {DIGEST_BYTES} are wanted")


def token_to_wire(token: Token) -> inference_pb2.Token:
    top = [inference_pb2.TokenLogprob(token=each, logprob=logprob) for each, logprob in token.top]
    return inference_pb2.Token(token=token.id, logprob=token.logprob, top=top)


def token_from_wire(wire: inference_pb2.Token) -> Token:
    """Convert a message to a token. Raises Malformed if a log-probability is infinite or not a number."""
    if not wire.HasField("logprob") and not wire.top:
        return Token(wire.token)
    logprob = wire.logprob if wire.HasField("logprob") else None
    if not all(each < inf for each in (wire.logprob, *(each.logprob for each in wire.top))):
        raise Malformed("token.logprob is not a number below infinity")
    return Token(wire.token, logprob, tuple((each.token, each.logprob) for each in wire.top))


def tokens_from_wire(wire: Iterable[inference_pb2.Token]) -> tuple[Token, ...]:
    """Convert messages to tokens. Raises Malformed as `token_from_wire` does."""
    return tuple(
        [
            token_from_wire(each)
            if each.HasField("logprob") or each.top
            else _new_token((each.token, None, ()))
            for each in wire
        ]
    )


def scores_to_wire(scores: Sequence[Score]) -> Iterator[inference_pb2.Scores]:
    """Yield the log-probabilities of a prompt's tokens, from the second token on, as messages.

    A message has up to SCORES_A_MESSAGE log-probabilities, but at least those of one token. There are at most
    SCORE_MESSAGES_MAX messages.
    """
    each = 1 if not scores else max(SCORES_A_MESSAGE // (1 + len(scores[0].top)), 1)
    for begin in range(0, len(scores), each):
        part = scores[begin : begin + each]
        yield inference_pb2.Scores(
            first=1 + begin,
            logprobs=[score.logprob for score in part],
            ranks=[score.rank for score in part],
            top_tokens=[token for score in part for token, _ in score.top],
            top_logprobs=[logprob for score in part for _, logprob in score.top],
        )


def scores_from_wire(wire: inference_pb2.Scores) -> list[Score]:
    """Convert a message to log-probabilities of prompt tokens.

    Raises Malformed if its lists do not match in length, or if a log-probability is infinite or not a number.
    """
    count, tops = len(wire.logprobs), len(wire.top_tokens)
    if not count or len(wire.ranks) != count or tops % count or len(wire.top_logprobs) != tops:
        raise Malformed("scores are not equally many of each kind")
    if not all(each < inf for each in (*wire.logprobs, *wire.top_logprobs)):
        raise Malformed("scores have a logprob that is not a number below infinity")
    width = tops // count
    pairs = list(zip(wire.top_tokens, wire.top_logprobs, strict=True))
    return [
        Score(logprob, rank, tuple(pairs[place * width : (place + 1) * width]))
        for place, (logprob, rank) in enumerate(zip(wire.logprobs, wire.ranks, strict=True))
    ]


def finish_to_wire(finish: FinishReason | None) -> inference_pb2.FinishReason.ValueType:
    return _FINISHES[finish]


def finish_from_wire(wire: int) -> FinishReason | None:
    try:
        return _FINISHED[wire]
    except KeyError:
        raise Malformed(f"finish has the unknown value {wire}") from None


def cause_to_wire(cause: Cause) -> rooms_pb2.Cause:
    return rooms_pb2.Cause(reason=cause.reason.value, text=cause.text)


def cause_from_wire(wire: rooms_pb2.Cause) -> Cause:
    try:
        return Cause(Reason(wire.reason), shown_from_wire(wire.text, TEXT_CHARS_MAX))
    except ValueError as error:
        raise Malformed(f"cause.reason has the unknown value {wire.reason!r}") from error


def outcome_to_wire(cause: Cause | None) -> rooms_pb2.Outcome:
    return rooms_pb2.Outcome(cause=None if cause is None else cause_to_wire(cause))


def outcome_from_wire(wire: rooms_pb2.Outcome) -> Cause | None:
    return cause_from_wire(wire.cause) if wire.HasField("cause") else None


def tables_to_wire(pages: PageTables) -> list[inference_pb2.PageTable]:
    return [inference_pb2.PageTable(pages=table) for table in pages]


def tables_from_wire(wire: Iterable[inference_pb2.PageTable]) -> PageTables:
    return tuple(cast(tuple[PageId, ...], tuple(table.pages)) for table in wire)


def peer_to_wire(facts: WorkerFacts) -> rooms_pb2.Peer:
    return rooms_pb2.Peer(
        name=facts.name,
        incarnation=facts.incarnation,
        address=facts.address,
        secret_digest=facts.secret_digest,
    )


def side_to_wire(side: Side) -> rooms_pb2.Side.ValueType:
    return _SIDES[side]
