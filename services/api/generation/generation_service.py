"""Service that turns a validated request of any API into a reply.

Every API calls it with a `ChatRequest` or a `CompletionRequest`, into which it translated its own request,
and with a rendering, which knows the API's response format.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from baton.api.backend import Backend, Limits
from baton.api.generation.answer_stream import by_request
from baton.api.generation.choice_assembler import AnswerParsing, ChoiceAssembler
from baton.api.generation.prompt_echo import PromptEcho
from baton.api.generation.prompt_encoder import PromptEncoder
from baton.api.generation.rendering import Rendering
from baton.api.generation.reply import CompleteStream, PendingAnswer, StreamedReply, WholeReply
from baton.api.generation.transcript import Transcript
from baton.api.http.authentication import caller_in, prefix_owner_in
from baton.api.http.event_stream import Framing
from baton.api.http.http_exchange import HttpExchange, exchange_of
from baton.api.http.metrics import HttpMetrics
from baton.api.http.request_headers import takes_events_for_lines
from baton.api.http.tenants import tenant_of
from baton.api.model_interface import Model
from baton.api.requests.cache_salt import salt_of
from baton.api.requests.meaning import Meaning
from baton.api.requests.meaning_reader import (
    chat_meaning,
    chat_tools,
    check_model,
    completion_meaning,
    request_id_of,
)
from baton.api.requests.request_builder import Bounds, admit, truncated
from baton.api.requests.schemas import ChatRequest, CompletionRequest, GenerationRequest
from baton.api.resuming.answer_start import AnswerStart, AnswerStarts
from baton.api.resuming.drawn_values import DrawnValues
from baton.api.resuming.event_ids import EventIds
from baton.api.resuming.stream_identity import UNKNOWN_ENGINE, digest_of_texts
from baton.api.settings import ApiSettings
from baton.api.text.detokenizer import Detokenizer
from baton.rooms.request import Grammar, GrammarKind
from baton.rooms.request import Request as WorkerRequest
from baton.runtime.clock import Clock
from baton.runtime.logging import Log
from baton.telemetry.tracing import Attribute

Render = Callable[[AnswerStart, Meaning, DrawnValues], Rendering]
"""Function that makes the rendering of one reply. It is called after the fields of the request were checked,
and before the prompt is encoded."""
MakeParsing = Callable[[], AnswerParsing | None]
"""Function that makes a new answer parser for one choice. It returns None if the text is not parsed."""


log = Log(__name__)


class Constraints(Protocol):
    """Interface of the compiler of grammars that constrain answers: JSON schemas, regular expressions and
    tool calls. The package `tools` implements it."""

    async def grammar(self, request: Request, body: GenerationRequest) -> Grammar | None:
        """Return the compiled grammar of a completion, or None if its answer is not constrained. Raises
        ApiError, Overloaded, ClientGone."""

    async def constrain_chat(
        self, request: Request, body: ChatRequest, meaning: Meaning, prompt: Sequence[int]
    ) -> tuple[Grammar | None, MakeParsing]:
        """Return the compiled grammar of a chat's answer, or None, and the parser that fits it. `prompt`:
        token ids of the rendered chat. Raises ApiError, Overloaded, ClientGone."""


class GenerationService:
    """Service that answers the chat and completion requests of one HTTP application."""

    def __init__(
        self,
        backend: Backend,
        model: Model,
        prompts: PromptEncoder,
        metrics: HttpMetrics,
        settings: ApiSettings,
        constraints: Constraints,
        starts: AnswerStarts,
        clock: Clock,
    ) -> None:
        self._backend = backend
        self._model = model
        self._prompts = prompts
        self._metrics = metrics
        self._settings = settings
        self._constraints = constraints
        self._starts = starts
        self._clock = clock
        self._bounds = Bounds(settings.clip_max_tokens, settings.max_logprobs, settings.min_priority)

    async def chat(
        self, request: Request, body: ChatRequest, render: Render, *, clips: bool = False
    ) -> Response:
        """Return the reply to a chat request. Generation starts when the server sends the reply. `clips`:
        lower a `max_tokens` that does not fit, whatever the settings say. Raises ApiError, Overloaded,
        ClientGone."""
        start = self._begin(request, body)
        if start.has_ended:
            return CompleteStream()
        meaning = chat_meaning(body, clips=clips)
        draws = self._starts.values(start)
        rendering = self._open(exchange_of(request), body, render(start, meaning, draws))
        whole = body.truncate_prompt_tokens is None
        prompt = await self._prompts.of_messages(
            request, body, meaning.tools.offered, fit=whole, now_s=start.created_s
        )
        if not whole:
            prompt = truncated(prompt, body, meaning, self._backend.limits())
        await self._prompts.check_messages(request, body, meaning.tools.offered, prompt)
        grammar, parsing = await self._constraints.constrain_chat(request, body, meaning, prompt)
        return await self._reply(request, start, draws, body, meaning, [prompt], rendering, grammar, parsing)

    async def count(self, request: Request, body: ChatRequest) -> int:
        """Return the number of prompt tokens of a chat request, without generating an answer. The prompt may
        be longer than the context. Raises ApiError, Overloaded, ClientGone."""
        check_model(body.model, self._model.names)
        tools = chat_tools(body)
        return len(await self._prompts.of_messages(request, body, tools.offered, fit=False))

    async def completion(self, request: Request, body: CompletionRequest, render: Render) -> Response:
        """Return the reply to a completion request. Generation starts when the server sends the reply. Raises
        ApiError, Overloaded, ClientGone."""
        start = self._begin(request, body)
        if start.has_ended:
            return CompleteStream()
        meaning = completion_meaning(body)
        draws = self._starts.values(start)
        rendering = self._open(exchange_of(request), body, render(start, meaning, draws))
        grammar = await self._constraints.grammar(request, body)
        whole = body.truncate_prompt_tokens is None
        tokens = await self._prompts.of_texts(
            request,
            body.prompt,
            meaning.prompt_param,
            add_special_tokens=body.add_special_tokens,
            fit=whole,
        )
        if not whole:
            tokens = [truncated(each, body, meaning, self._backend.limits()) for each in tokens]
        self._prompts.check_texts(body.prompt, tokens, meaning.prompt_param)
        given = body.prompt if whole else [None] * len(tokens)
        return await self._reply(
            request, start, draws, body, meaning, tokens, rendering, grammar, given=given
        )

    def _begin(self, request: Request, body: GenerationRequest) -> AnswerStart:
        """Return the values that the answer begins with. A request with `Last-Event-ID` gets those of the
        stream that it continues, and its request id. Raises ApiError."""
        exchange = exchange_of(request)
        if body.model is not None:
            check_model(body.model, self._model.names)
        exchange.name(request_id_of(body))
        start = self._starts.resume(
            exchange.headers, request.scope["path"], exchange.body_digest, streams=body.stream
        )
        if start is None:
            created_s = self._clock.wall_ms() // 1000
            return AnswerStart(exchange.request_id, not exchange.has_own_id, created_s)
        exchange.resume(start.request_id, has_own_id=not start.has_drawn_id)
        log.info("a stream is resumed", **exchange.log_ids)
        return start

    def _open(self, exchange: HttpExchange, body: GenerationRequest, rendering: Rendering) -> Rendering:
        """Begin the event stream, if the request asks for one, and return the rendering. From now on the
        stream sends keep-alives, because encoding the prompt and compiling a grammar may take long."""
        if body.stream:
            framing = rendering.framing
            if not has_event_ids(exchange, body, framing):
                framing = framing.without_ids
            exchange.begin_events(framing, rendering.failure, self._settings.stream_silence_s)
        return rendering

    async def _reply(
        self,
        request: Request,
        start: AnswerStart,
        draws: DrawnValues,
        body: GenerationRequest,
        meaning: Meaning,
        tokens: list[list[int]],
        rendering: Rendering,
        grammar: Grammar | None,
        parsing: MakeParsing = lambda: None,
        given: Sequence[str | list[int] | None] = (None,),
    ) -> Response:
        """Build the worker requests and their choices, and return the reply that will generate them.
        `tokens`: token ids of each prompt. `parsing`: makes the parser of each choice. `given`: each prompt
        as the client sent it, or None if it was truncated."""
        model, settings, exchange = self._model, self._settings, exchange_of(request)
        owner, caller = prefix_owner_in(request.scope), caller_in(request.scope)
        tenant = exchange.headers.get(settings.tenant_header)
        admitted = admit(
            body,
            meaning,
            tokens,
            model,
            self._backend.limits(),
            exchange.request_id,
            exchange.trace,
            grammar,
            bounds=self._bounds,
            salt=salt_of(body.cache_salt, owner) if body.cache_salt or owner else 0,
            tenant=tenant_of(caller, tenant) if tenant else caller,
            draws=draws,
            max_tokens=start.max_tokens,
        )
        exchange.describe(lambda: _span_attributes(body, meaning, model, admitted))
        echoes: Sequence[PromptEcho | None] = [None] * len(admitted)
        if meaning.shows_prompt:
            echoes = await self._prompts.echoes(request, body, [each.prompt for each in admitted], given)
        choices: list[ChoiceAssembler] = []
        for each, echo in zip(admitted, echoes, strict=True):
            for _ in range(each.choices):
                detokenizer = self._detokenizer(each, meaning)
                choices.append(
                    ChoiceAssembler(len(choices), each, meaning, detokenizer, parsing(), echo, draws)
                )
        answering = PendingAnswer(
            backend=self._backend,
            choices=choices,
            rendering=rendering,
            metrics=self._metrics,
            exchange=exchange,
            transcript=Transcript(choices, model.tokenizer, exchange.log_ids)
            if settings.log_prompts
            else None,
            best=meaning.choices if meaning.drawn > meaning.choices else None,
        )
        if exchange.events is None:
            return WholeReply(answering)
        ids = self._ids(request, start, choices) if exchange.events.framing.has_ids else None
        return StreamedReply(answering, ids, start.position)

    def _detokenizer(self, request: WorkerRequest, meaning: Meaning) -> Detokenizer:
        """Return a new detokenizer for the output behind the request's prompt."""
        tokenizer = self._model.tokenizer
        return Detokenizer(
            tokenizer.codec,
            request.prompt,
            skip_special_tokens=meaning.skips_special,
            whole_texts=tokenizer.whole_texts,
        )

    def _ids(
        self,
        request: Request,
        start: AnswerStart,
        choices: Sequence[ChoiceAssembler],
    ) -> EventIds:
        """Return the ids of the stream's events. Raises ApiError if a stream cannot be continued here."""
        most = [own[0].request.max_tokens for own in by_request(choices)]
        digest, engine = exchange_of(request).body_digest, _engine_digest(self._backend.limits())
        return self._starts.ids(start, request.scope["path"], digest, engine, most, len(choices))


def has_event_ids(exchange: HttpExchange, body: GenerationRequest, framing: Framing) -> bool:
    """Return whether the events of the stream have ids. Unless the request says so, a stream of unnamed
    events has none for a client that takes each event for a line."""
    if body.event_ids is not None:
        return body.event_ids
    return framing.named or not takes_events_for_lines(exchange.headers)


def _engine_digest(limits: Limits) -> bytes:
    """Return a digest of the workers' engine, or UNKNOWN_ENGINE if no worker is known."""
    engine = limits.engine
    if engine is None:
        return UNKNOWN_ENGINE
    return digest_of_texts(engine.name, engine.dtype, limits.quantize)


def _span_attributes(
    body: GenerationRequest, meaning: Meaning, model: Model, admitted: Sequence[WorkerRequest]
) -> dict[str, Attribute]:
    """Return the attributes of a request's trace span, by OpenTelemetry's conventions for generative AI."""
    first = admitted[0]
    sampling = first.sampling
    wants_json = first.grammar is not None and first.grammar.kind is GrammarKind.JSON_SCHEMA
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "chat" if isinstance(body, ChatRequest) else "text_completion",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model.name,
        "gen_ai.response.model": model.name,
        "gen_ai.request.max_tokens": first.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.output.type": "json" if wants_json else "text",
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = float(sampling.top_k)
    if body.seed is not None:
        attributes["gen_ai.request.seed"] = body.seed
    if (count := len(admitted) * meaning.choices) > 1:
        attributes["gen_ai.request.choice.count"] = count
    return attributes
