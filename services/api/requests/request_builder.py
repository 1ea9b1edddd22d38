"""Construction of the requests for the workers, with checks of what the model and the workers can serve.

Everything is checked here, before a request enters any queue (`rejected-stays-out`). Every default is
resolved, so that any worker, and any later attempt, computes the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from baton.api.backend import Limits
from baton.api.errors import ApiError, invalid, too_long
from baton.api.model_interface import ModelDefaults
from baton.api.requests.field_types import ANSWERS_MAX
from baton.api.requests.meaning import Meaning
from baton.api.requests.sampling_defaults import sampling_fields_of
from baton.api.requests.schemas import GenerationRequest
from baton.api.requests.scored_prompts import ALL, alternatives, check_scores, scored
from baton.api.requests.token_ids import check_ids, not_a_token
from baton.api.resuming.drawn_values import DrawnValues, random_values
from baton.rooms.choice_pages import longest_of, positions_of
from baton.rooms.plurals import counted
from baton.rooms.request import Grammar, Request, Sampling
from baton.rooms.trace import TraceContext

FEW_LOGPROBS: Final = 256
"""Number of log-probabilities per token up to which a response may have any number of them. Above it,
SHOWN_LOGPROBS_MAX limits them."""
SHOWN_LOGPROBS_MAX: Final = 2**20
"""Most log-probabilities in the response to one request, if it asks for more than FEW_LOGPROBS per token. As
JSON they take some hundred megabytes."""
GREEDY_BELOW: Final = 1e-5
"""Temperature below which sampling is greedy, as in vLLM. Dividing logits by such a temperature would
overflow."""
SEEDS: Final = 2**64


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits and rules of the deployment that apply to every request, set by the operator."""

    clips: bool = False
    """Whether a `max_tokens` that does not fit is lowered to what fits, for every request."""
    logprobs_max: int = ALL
    """Most alternative tokens returned with each token; -1: any number."""
    priority_min: int = 0
    """Lowest priority class that a request may name. Requests of a lower class are served first."""


UNBOUND: Final = Bounds()


def admit(
    body: GenerationRequest,
    meaning: Meaning,
    prompts: Sequence[Sequence[int]],
    model: ModelDefaults,
    limits: Limits,
    request_id: str,
    trace: TraceContext | None = None,
    grammar: Grammar | None = None,
    *,
    salt: int,
    draws: DrawnValues | None = None,
    tenant: bytes = b"",
    bounds: Bounds = UNBOUND,
    max_tokens: Sequence[int] | None = None,
) -> list[Request]:
    """Return the requests for the workers: one for each prompt, in order, with an id of its own.

    If the client gives no seed, each prompt gets one of `draws` (by default random ones), because a draw
    depends only on seed and position. Choice i of a prompt is drawn like a request with the prompt's seed
    plus i. `max_tokens`: most output tokens, by prompt, of a stream that is continued. Raises ApiError.
    """
    _check_fields(body, meaning, model, bounds)
    top, scored_param = _prompt_alternatives(body, meaning, prompts, model.vocabulary, bounds)
    own_limits = limits if top is None else replace(limits, alone_tokens=0)
    choices = _choices(body, meaning, len(prompts))
    _check_whole(choices, scored_param, limits)
    sampling = _sampling(body, meaning, model, bounds)
    clips = max_tokens is None and (meaning.clips or bounds.clips)
    requests = []
    for index, prompt in enumerate(prompts):
        param = meaning.prompt_param if len(prompts) == 1 else f"{meaning.prompt_param}[{index}]"
        _check_prompt(prompt, param, model)
        own = meaning if max_tokens is None else replace(meaning, max_tokens=max_tokens[index])
        most = _max_tokens(own, param, len(prompt), choices, own_limits, clips=clips)
        _check_output(body, meaning, sampling, model.vocabulary, most, choices.drawn * len(prompts))
        if body.seed is None:
            sampling = replace(sampling, seed=(draws or random_values()).seed(index))
        requests.append(
            Request(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                prompt=tuple(prompt),
                max_tokens=most,
                min_tokens=body.min_tokens,
                eos_token_ids=model.eos_token_ids,
                stop_token_ids=_stop_ids(body),
                ignore_eos=_is_endless(body, model),
                sampling=sampling,
                trace=trace,
                grammar=grammar,
                salt=salt,
                further_seeds=tuple((sampling.seed + each) % SEEDS for each in range(1, choices.drawn)),
                prompt_logprobs=top,
                priority=body.priority,
                speculates=body.speculate,
                tenant=tenant,
                resumes=max_tokens is not None,
            )
        )
    return requests


def _check_prompt(prompt: Sequence[int], param: str, model: ModelDefaults) -> None:
    """Raise ApiError for a token id that the model does not have."""
    if max(prompt, default=0) >= model.vocabulary:
        check_ids(prompt, param, model.vocabulary)


def _is_endless(body: GenerationRequest, model: ModelDefaults) -> bool:
    """Return whether no end-of-sequence token ends a choice."""
    return body.ignore_eos or not any(_may_come(id_, body) for id_ in model.eos_token_ids)


def _stop_ids(body: GenerationRequest) -> tuple[int, ...]:
    return tuple(id_ for id_ in dict.fromkeys(body.stop_token_ids) if _may_come(id_, body))


def _check_fields(body: GenerationRequest, meaning: Meaning, model: ModelDefaults, bounds: Bounds) -> None:
    """Raise ApiError if fields contradict each other, the model, or the rules of the deployment."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "'stream_options' needs 'stream' to be true.")
    if body.priority < bounds.priority_min:
        why = f"'priority' is {body.priority}; the lowest that is taken here is {bounds.priority_min}."
        raise invalid("priority", why)
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        if ids := getattr(body, name):
            check_ids(ids, name, model.vocabulary)
    if body.logprob_token_ids and meaning.top_logprobs is None:
        raise invalid("logprob_token_ids", "'logprob_token_ids' needs 'logprobs'.")


def _prompt_alternatives(
    body: GenerationRequest,
    meaning: Meaning,
    prompts: Sequence[Sequence[int]],
    vocabulary: int,
    bounds: Bounds,
) -> tuple[int | None, str]:
    """Return the number of alternatives to report for each prompt token, and the name of the request field
    that asks for them. The number is None if no field does. Raises ApiError."""
    top, param = scored(body) if meaning.shows_prompt else (None, "")
    if top is None:
        return None, ""
    top = alternatives(top, param, vocabulary, bounds.logprobs_max)
    check_scores(prompts, meaning.drawn, top, param)
    return top, param


@dataclass(frozen=True, slots=True)
class _Choices:
    """Number of choices that are generated for each prompt, and the field that sets it."""

    drawn: int
    param: str
    """Name of the request field that sets the number of choices: `n` or `best_of`."""


def _choices(body: GenerationRequest, meaning: Meaning, prompts: int) -> _Choices:
    """Return the number of choices to generate for each prompt. `prompts`: number of prompts. Raises
    ApiError."""
    drawn = meaning.drawn
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


def _check_whole(choices: _Choices, scored_param: str, limits: Limits) -> None:
    """Raise ApiError for options that need a prompt computed in parts, with an engine that computes it as a
    whole. `scored_param`: field that asks for log-probabilities of the prompt."""
    if not limits.whole_prompts:
        return
    why = "the engine that serves this model computes a prompt as a whole"
    if choices.drawn > 1:
        raise invalid(choices.param, f"'{choices.param}' is {choices.drawn}, and {why}: one answer is drawn.")
    if scored_param:
        raise invalid(scored_param, f"'{scored_param}' asks for a prompt's scores, and {why}: it gives none.")


def _may_come(id_: int, body: GenerationRequest) -> bool:
    return not body.allowed_token_ids or id_ in body.allowed_token_ids


def truncated(tokens: list[int], body: GenerationRequest, meaning: Meaning, limits: Limits) -> list[int]:
    """Return the tokens of a prompt, shortened if the request sets `truncate_prompt_tokens`. Raises ApiError
    if that is more than the context."""
    most = body.truncate_prompt_tokens
    if most is None:
        return tokens
    if most > limits.context_tokens:
        why = f"'truncate_prompt_tokens' is {most}; the context has {limits.context_tokens} tokens."
        raise invalid("truncate_prompt_tokens", why)
    if most < 0:
        most = max(limits.context_tokens - (meaning.max_tokens or meaning.default_tokens or 1), 1)
    if len(tokens) <= most:
        return tokens
    return tokens[len(tokens) - most :] if body.truncation_side == "left" else tokens[:most]


def _sampling(body: GenerationRequest, meaning: Meaning, model: ModelDefaults, bounds: Bounds) -> Sampling:
    vocabulary, sampling_fields = model.vocabulary, sampling_fields_of(body, model.recommended_sampling)
    bias = {int(key): value for key, value in body.logit_bias.items()}
    for id_ in bias:
        if id_ >= vocabulary:
            raise not_a_token("logit_bias", id_, vocabulary)
    return Sampling(
        temperature=0.0 if sampling_fields.temperature < GREEDY_BELOW else sampling_fields.temperature,
        top_p=sampling_fields.top_p,
        top_k=sampling_fields.top_k if 0 < sampling_fields.top_k < vocabulary else 0,
        min_p=sampling_fields.min_p,
        repetition_penalty=sampling_fields.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=0 if body.seed is None else body.seed % SEEDS,
        logit_bias=tuple(sorted(bias.items())),
        top_logprobs=_top_logprobs(meaning, vocabulary, bounds),
        logprob_token_ids=tuple(dict.fromkeys(body.logprob_token_ids)),
    )


def _top_logprobs(meaning: Meaning, vocabulary: int, bounds: Bounds) -> int | None:
    """Return the number of alternatives to report for each output token. None: no log-probabilities. It is 0
    if they only serve to find the best choices."""
    if meaning.top_logprobs is None:
        return 0 if meaning.drawn > meaning.choices else None
    return alternatives(meaning.top_logprobs, meaning.top_logprobs_param, vocabulary, bounds.logprobs_max)


def _check_output(
    body: GenerationRequest,
    meaning: Meaning,
    sampling: Sampling,
    vocabulary: int,
    max_tokens: int,
    answers: int,
) -> None:
    """Raise ApiError if `min_tokens` does not fit, or if a request asks for too many log-probabilities.
    `answers`: number of all choices, each of up to `max_tokens` tokens."""
    if body.min_tokens > max_tokens:
        may_come = counted(max_tokens, "token")
        raise invalid("min_tokens", f"'min_tokens' is more than the {may_come} that may come.")
    tops, tokens = sampling.tops(vocabulary) or 0, max_tokens * answers
    if tops > FEW_LOGPROBS and tops * tokens > SHOWN_LOGPROBS_MAX:
        param = meaning.top_logprobs_param
        why = f"'{param}' asks for {tops} log-probabilities of up to {tokens} tokens"
        raise invalid(param, f"{why}; at most {SHOWN_LOGPROBS_MAX} are told of one request.")


def _max_tokens(
    meaning: Meaning, param: str, prompt_tokens: int, choices: _Choices, limits: Limits, *, clips: bool
) -> int:
    """Return the most output tokens of each choice. No memory is reserved for them.

    If the client sets no limit, it is what fits a worker that is available now, if such a worker can hold the
    prompt. Raises ApiError if the prompt or the requested number of tokens does not fit.
    """
    room = _room(param, prompt_tokens, limits)
    each = min(room, _room_of_each(prompt_tokens, choices.drawn, limits.sequence_tokens, limits))
    if each < 1:
        raise _too_many(choices, prompt_tokens, meaning.max_tokens or 1, each, limits)
    if meaning.max_tokens is None:
        now = _room_of_each(prompt_tokens, choices.drawn, limits.sequence_tokens_now, limits)
        fits = min(each, now) if now >= 1 else each
        return fits if meaning.default_tokens is None else min(fits, meaning.default_tokens)
    if clips:
        return min(meaning.max_tokens, each)
    if meaning.max_tokens > room:
        raise too_long(
            meaning.max_tokens_param,
            limits.context_tokens,
            f"'{meaning.max_tokens_param}' is {meaning.max_tokens}, and after a prompt of "
            f"{counted(prompt_tokens, 'token')} there is space for {room}",
        )
    if meaning.max_tokens > each:
        raise _too_many(choices, prompt_tokens, meaning.max_tokens, each, limits)
    return meaning.max_tokens


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
    """Return how many output tokens fit for each of several choices, which share a cache of `sequence_tokens`
    positions. If that size is not known (0), return the context's length."""
    if not sequence_tokens:
        return limits.context_tokens
    if choices == 1:
        return _output_tokens(prompt_tokens, sequence_tokens)
    return _output_tokens(
        prompt_tokens, longest_of(prompt_tokens, choices, sequence_tokens, limits.page_tokens)
    )


def _room(param: str, prompt_tokens: int, limits: Limits) -> int:
    """Return how many output tokens fit after the prompt, at least 1. Raises ApiError if none fits."""
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
        room = min(room, _output_tokens(prompt_tokens, limits.sequence_tokens))
        if room < 1:
            raise too_long(
                param, context, f"{holds} the decode workers' caches hold {limits.sequence_tokens}"
            )
    return room


def _output_tokens(prompt_tokens: int, sequence_tokens: int) -> int:
    """Return how many output tokens fit a cache of `sequence_tokens` positions after the prompt. The last
    token's KV is never stored."""
    return sequence_tokens - prompt_tokens + 1
