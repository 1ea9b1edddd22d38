"""Can this request be served, and what exactly does it ask of a worker?

Everything is judged here, before anything enters the pipeline (`rejected-stays-out`), and every default
is resolved, so that any worker, and any later attempt, computes the same tokens.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from baton.api.backend import Limits
from baton.api.errors import ApiError, invalid, too_long, unknown_model
from baton.api.generation.prompt_echo import ALL, alternatives, check_scores, scored
from baton.api.requests.sampling_defaults import sampling_fields_of
from baton.api.requests.schemas import (
    ANSWERS_MAX,
    COMPLETION_TOKENS_DEFAULT,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RecommendedSampling,
)
from baton.api.served_model import ServedModel
from baton.rooms.choice_pages import longest_of, positions_of
from baton.rooms.plurals import counted
from baton.rooms.request import Grammar, Request, Sampling
from baton.rooms.trace import TraceContext

FEW_LOGPROBS: Final = 256
"""Of a token: they are bounded by the context."""
TOLD_MAX: Final = 2**20
"""Log-probabilities of one request's answers, where they are more of each token: some hundred megabytes as
JSON is made of them."""
GREEDY_BELOW: Final = 1e-5
"""A temperature below it means greedy, as in vLLM: dividing by it would overflow."""


SEEDS: Final = 2**64


class Defaults(Protocol):
    """What a model brings to each of its requests: of a `ServedModel`."""

    @property
    def name(self) -> str: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def drawing(self) -> RecommendedSampling: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for that depends on its kind, with the names to blame."""

    prompt_param: str
    max_tokens: int | None
    max_tokens_param: str
    default_tokens: int | None
    """Output tokens if the caller names no number; None: as many as fit."""
    top_logprobs: int | None
    top_logprobs_param: str
    clips: bool = False
    """More tokens than there is room for are as many as there is room for."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of what any request of a deployment may ask for."""

    clips: bool = False
    """As of `Asked`, whatever the kind."""
    logprobs_max: int = ALL
    """Most alternatives told of a token."""
    priority_min: int = 0
    """The lowest class that may be asked for."""


UNBOUND: Final = Bounds()


def asked_in_chat(body: ChatRequest, *, clips: bool = False) -> Asked:
    """`clips`: as of what it returns. Raises ApiError where two fields contradict each other."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    both = body.max_tokens, body.max_completion_tokens
    if None not in both and both[0] != both[1]:
        raise invalid("max_tokens", "'max_tokens' and 'max_completion_tokens' differ; give one of them.")
    efforts = {body.reasoning_effort, body.reasoning.effort, body.reasoning.reasoning_effort} - {None}
    off = body.reasoning.enabled is False and efforts - {"none"}
    if len(efforts) > 1 or off or (body.reasoning.enabled and "none" in efforts):
        raise invalid("reasoning", "'reasoning' contradicts itself, or 'reasoning_effort'.")
    newer = body.max_completion_tokens is not None
    return Asked(
        prompt_param="messages",
        max_tokens=body.max_completion_tokens if newer else body.max_tokens,
        max_tokens_param="max_completion_tokens" if newer else "max_tokens",
        default_tokens=None,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        top_logprobs_param="top_logprobs",
        clips=clips,
    )


def asked_in_completion(body: CompletionRequest) -> Asked:
    """Raises ApiError where two fields contradict each other."""
    given = "max_tokens" in body.model_fields_set
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "'max_tokens' is 0, which only 'echo' leaves anything to answer.")
    if body.max_tokens == 0 and body.min_tokens:
        raise invalid("min_tokens", "'min_tokens' is more than the 0 tokens that may come.")
    return Asked(
        prompt_param="prompt",
        # A worker draws a token with the prompt's last one. It is not told.
        max_tokens=(body.max_tokens or 1) if given else None,
        max_tokens_param="max_tokens",
        default_tokens=COMPLETION_TOKENS_DEFAULT,
        top_logprobs=body.logprobs,
        top_logprobs_param="logprobs",
    )


def admit(
    body: GenerationRequest,
    asked: Asked,
    prompts: Sequence[Sequence[int]],
    model: Defaults,
    limits: Limits,
    request_id: str,
    trace: TraceContext | None = None,
    grammar: Grammar | None = None,
    *,
    salt: int,
    tenant: bytes = b"",
    bounds: Bounds = UNBOUND,
) -> list[Request]:
    """One request per prompt, in order, with ids of their own, and with seeds of their own where the caller
    gave none: a draw depends on seed and position alone, and equal prompts may have other answers. Choice i
    of a prompt is drawn as a request with its seed plus i would be.

    Raises ApiError.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "'stream_options' needs 'stream' to be true.")
    if body.priority < bounds.priority_min:
        why = f"'priority' is {body.priority}; the lowest that is taken here is {bounds.priority_min}."
        raise invalid("priority", why)
    check_ids(body.stop_token_ids, "stop_token_ids", model.vocabulary)
    check_ids(body.allowed_token_ids, "allowed_token_ids", model.vocabulary)
    check_ids(body.logprob_token_ids, "logprob_token_ids", model.vocabulary)
    if body.logprob_token_ids and asked.top_logprobs is None:
        raise invalid("logprob_token_ids", "'logprob_token_ids' needs 'logprobs'.")
    top, param = scored(body)
    if top is not None:
        top = alternatives(top, param, model.vocabulary, bounds.logprobs_max)
        check_scores(prompts, answers_drawn(body), top, param)
    stops = tuple(id_ for id_ in dict.fromkeys(body.stop_token_ids) if _may_come(id_, body))
    endless = body.ignore_eos or not any(_may_come(id_, body) for id_ in model.eos_token_ids)
    choices = _choices(body, len(prompts))
    sampling = _sampling(body, asked, model, bounds)
    clips = asked.clips or bounds.clips
    requests = []
    for place, prompt in enumerate(prompts):
        param = asked.prompt_param if len(prompts) == 1 else f"{asked.prompt_param}[{place}]"
        check_ids(prompt, param, model.vocabulary)
        held = limits if top is None else replace(limits, alone_tokens=0)
        max_tokens = _max_tokens(asked, param, len(prompt), choices, held, clips=clips)
        if body.min_tokens > max_tokens:
            raise invalid(
                "min_tokens", f"'min_tokens' is more than the {counted(max_tokens, 'token')} that may come."
            )
        _check_told(asked, sampling, model.vocabulary, max_tokens * choices.drawn * len(prompts))
        if place and body.seed is None:
            sampling = replace(sampling, seed=_any_seed())
        requests.append(
            Request(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{place}",
                prompt=tuple(prompt),
                max_tokens=max_tokens,
                min_tokens=body.min_tokens,
                eos_token_ids=model.eos_token_ids,
                stop_token_ids=stops,
                ignore_eos=endless,
                sampling=sampling,
                trace=trace,
                grammar=grammar,
                salt=salt,
                further_seeds=tuple((sampling.seed + each) % SEEDS for each in range(1, choices.drawn)),
                prompt_logprobs=top,
                priority=body.priority,
                speculates=body.speculate,
                tenant=tenant,
            )
        )
    return requests


@dataclass(frozen=True, slots=True)
class _Choices:
    """Of each prompt."""

    drawn: int
    param: str
    """By which the caller asked for them."""


def _choices(body: GenerationRequest, prompts: int) -> _Choices:
    """Raises ApiError."""
    drawn = answers_drawn(body)
    if drawn < body.n:
        why = f"'best_of' is {drawn}, and 'n' is {body.n}: at least as many are drawn as are given."
        raise invalid("best_of", why)
    if drawn > body.n and body.stream:
        why = "'best_of' is more than 'n': which answers are given is not known before all are drawn."
        raise invalid("best_of", f"{why} It is not served with 'stream'.")
    choices = _Choices(drawn, "n" if drawn == body.n else "best_of")
    if prompts * drawn > ANSWERS_MAX:
        of = f"'{choices.param}' is {drawn}, for each of {counted(prompts, 'prompt')}"
        raise invalid(choices.param, f"{of}; at most {ANSWERS_MAX} answers are drawn for one request.")
    return choices


def answers_drawn(body: GenerationRequest) -> int:
    """To each prompt."""
    return body.n if body.best_of is None else body.best_of


def _may_come(id_: int, body: GenerationRequest) -> bool:
    return not body.allowed_token_ids or id_ in body.allowed_token_ids


def truncated(tokens: list[int], body: GenerationRequest, asked: Asked, limits: Limits) -> list[int]:
    """A prompt as `body` wants it shortened. Raises ApiError."""
    most = body.truncate_prompt_tokens
    if most is None:
        return tokens
    if most > limits.context_tokens:
        why = f"'truncate_prompt_tokens' is {most}; the context has {limits.context_tokens} tokens."
        raise invalid("truncate_prompt_tokens", why)
    if most < 0:
        most = max(limits.context_tokens - (asked.max_tokens or asked.default_tokens or 1), 1)
    if len(tokens) <= most:
        return tokens
    return tokens[len(tokens) - most :] if body.truncation_side == "left" else tokens[:most]


def request_id_of(body: GenerationRequest) -> str | None:
    """That the body gives. Raises ApiError for two."""
    if body.rid is not None and body.request_id is not None and body.rid != body.request_id:
        raise invalid("rid", "'rid' and 'request_id' differ; give one of them.")
    return body.request_id or body.rid


def check_ids(ids: Sequence[int], param: str, vocabulary: int) -> None:
    """Raise ApiError that names the first id which the model does not have."""
    if ids and max(ids) >= vocabulary:
        place = next(place for place, each in enumerate(ids) if each >= vocabulary)
        raise _not_a_token(f"{param}[{place}]", ids[place], vocabulary)


def check_model(name: str | None, model: ServedModel) -> None:
    """Raise ApiError (404) unless `name`, where given, is one of the served model's."""
    if name is not None and name not in model.names:
        raise unknown_model(name)


def _sampling(body: GenerationRequest, asked: Asked, model: Defaults, bounds: Bounds) -> Sampling:
    vocabulary, drawing = model.vocabulary, sampling_fields_of(body, model.drawing)
    bias = {int(key): value for key, value in body.logit_bias.items()}
    for id_ in bias:
        if id_ >= vocabulary:
            raise _not_a_token("logit_bias", id_, vocabulary)
    return Sampling(
        temperature=0.0 if drawing.temperature < GREEDY_BELOW else drawing.temperature,
        top_p=drawing.top_p,
        top_k=drawing.top_k if 0 < drawing.top_k < vocabulary else 0,
        min_p=drawing.min_p,
        repetition_penalty=drawing.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=_any_seed() if body.seed is None else body.seed % SEEDS,
        logit_bias=tuple(sorted(bias.items())),
        top_logprobs=_top_logprobs(body, asked, vocabulary, bounds),
        logprob_token_ids=tuple(dict.fromkeys(body.logprob_token_ids)),
    )


def _top_logprobs(body: GenerationRequest, asked: Asked, vocabulary: int, bounds: Bounds) -> int | None:
    """Which answers are the best is judged by how likely their tokens were."""
    if asked.top_logprobs is None:
        return 0 if answers_drawn(body) > body.n else None
    return alternatives(asked.top_logprobs, asked.top_logprobs_param, vocabulary, bounds.logprobs_max)


def _check_told(asked: Asked, sampling: Sampling, vocabulary: int, tokens: int) -> None:
    """Raise ApiError where so many `tokens` may come with more log-probabilities than one request is told."""
    tops = sampling.tops(vocabulary) or 0
    if tops > FEW_LOGPROBS and tops * tokens > TOLD_MAX:
        why = f"'{asked.top_logprobs_param}' asks for {tops} log-probabilities of up to {tokens} tokens"
        raise invalid(asked.top_logprobs_param, f"{why}; at most {TOLD_MAX} are told of one request.")


def _any_seed() -> int:
    return secrets.randbits(64)


def _max_tokens(
    asked: Asked, param: str, prompt_tokens: int, choices: _Choices, limits: Limits, *, clips: bool
) -> int:
    """How many output tokens may come in each choice: no memory is set aside for them. Where the caller sets
    no end, no more than a worker holds that is there now, if one holds the prompt. Raises ApiError if the
    prompt or that many tokens do not fit."""
    room = _room(param, prompt_tokens, limits)
    each = min(room, _room_of_each(prompt_tokens, choices.drawn, limits.sequence_tokens, limits))
    if each < 1:
        raise _too_many(choices, prompt_tokens, asked.max_tokens or 1, each, limits)
    if asked.max_tokens is None:
        now = _room_of_each(prompt_tokens, choices.drawn, limits.sequence_tokens_now, limits)
        fits = min(each, now) if now >= 1 else each
        return fits if asked.default_tokens is None else min(fits, asked.default_tokens)
    if clips:
        return min(asked.max_tokens, each)
    if asked.max_tokens > room:
        raise too_long(
            asked.max_tokens_param,
            limits.context_tokens,
            f"'{asked.max_tokens_param}' is {asked.max_tokens}, and after a prompt of "
            f"{counted(prompt_tokens, 'token')} there is space for {room}",
        )
    if asked.max_tokens > each:
        raise _too_many(choices, prompt_tokens, asked.max_tokens, each, limits)
    return asked.max_tokens


def _too_many(choices: _Choices, prompt_tokens: int, max_tokens: int, each: int, limits: Limits) -> ApiError:
    taken = positions_of(prompt_tokens, prompt_tokens + max_tokens - 1, choices.drawn, limits.page_tokens)
    answers = f"{choices.drawn} answers of up to {counted(max_tokens, 'token')}"
    fits = f"so many of {counted(each, 'token')} each fit" if each >= 1 else "so many fit at no length"
    return invalid(
        choices.param,
        f"'{choices.param}' is {choices.drawn}: {answers} behind a prompt of "
        f"{counted(prompt_tokens, 'token')} take {taken} positions of a decode worker's "
        f"cache, which holds {limits.sequence_tokens}; {fits}.",
    )


def _room_of_each(prompt_tokens: int, choices: int, sequence_tokens: int, limits: Limits) -> int:
    """Output tokens of each of several choices beside each other in a cache of so many positions; 0: it is
    not known."""
    if not sequence_tokens:
        return limits.context_tokens
    if choices == 1:
        return _behind(prompt_tokens, sequence_tokens)
    return _behind(prompt_tokens, longest_of(prompt_tokens, choices, sequence_tokens, limits.page_tokens))


def _room(param: str, prompt_tokens: int, limits: Limits) -> int:
    """Output tokens that fit after the prompt, at least 1. Raises ApiError if none fits."""
    if prompt_tokens == 0:
        raise invalid(param, f"'{param}' holds no tokens; there is nothing to continue.")
    room, context = limits.context_tokens - prompt_tokens, limits.context_tokens
    holds = f"'{param}' has {counted(prompt_tokens, 'token')}, and"
    if room < 1:
        raise too_long(param, context, f"{holds} there has to be room for the answer")
    if 0 < limits.prompt_tokens < prompt_tokens and limits.alone_tokens < prompt_tokens:
        most = f"the prefill workers' caches hold {limits.prompt_tokens}"
        if limits.alone_tokens:
            most += f", those of decode workers that compute prompts {limits.alone_tokens}"
        raise too_long(param, context, f"{holds} {most}")
    if limits.sequence_tokens:
        room = min(room, _behind(prompt_tokens, limits.sequence_tokens))
        if room < 1:
            raise too_long(
                param, context, f"{holds} the decode workers' caches hold {limits.sequence_tokens}"
            )
    return room


def _behind(prompt_tokens: int, sequence_tokens: int) -> int:
    """Output tokens that a cache of so many positions holds: the last one's KV is never needed."""
    return sequence_tokens - prompt_tokens + 1


def _not_a_token(param: str, id_: int, vocabulary: int) -> ApiError:
    return invalid(param, f"'{param}': token id {id_} is not in the vocabulary of {vocabulary} tokens.")
