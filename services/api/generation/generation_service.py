"""How does a request that was understood come to its reply?

Every API ends here: what it was sent is a `ChatRequest` by now, or a `CompletionRequest`, and how its answers
look is a rendering's.
"""

from collections.abc import Callable, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from baton.api.backend import Backend
from baton.api.generation.choice_assembler import ChoiceAssembler, Heard
from baton.api.generation.prompt_encoder import PromptEncoder
from baton.api.generation.rendering import Rendering
from baton.api.generation.reply import PendingAnswer, StreamedReply, WholeReply
from baton.api.generation.transcript import Transcript
from baton.api.http.authentication import prefix_owner_in
from baton.api.http.metrics import HttpMetrics
from baton.api.http.middleware import exchange_of
from baton.api.http.tenants import tenant_of
from baton.api.requests.cache_salt import salt_of
from baton.api.requests.chat_messages import check_tools, offered
from baton.api.requests.request_builder import (
    Asked,
    Bounds,
    admit,
    answers_drawn,
    asked_in_chat,
    asked_in_completion,
    check_model,
    request_id_of,
    truncated,
)
from baton.api.requests.schemas import ChatRequest, CompletionRequest, GenerationRequest
from baton.api.served_model import ServedModel
from baton.api.settings import ApiSettings
from baton.api.tools.constraints.constraints import ConstraintCompiler, constraint_of
from baton.api.tools.format_detection import answer_parser
from baton.grammars.grammar_check import CheckGrammar
from baton.rooms.request import Grammar, GrammarKind
from baton.rooms.request import Request as Admitted
from baton.telemetry.tracing import Attribute

Render = Callable[[], Rendering]
"""Of one reply. Called once the request's own fields are found good."""


class GenerationService:
    """Of one application."""

    def __init__(
        self,
        backend: Backend,
        model: ServedModel,
        prompts: PromptEncoder,
        metrics: HttpMetrics,
        settings: ApiSettings,
        check: CheckGrammar,
    ) -> None:
        self._backend = backend
        self._model = model
        self._prompts = prompts
        self._metrics = metrics
        self._settings = settings
        self._structures = ConstraintCompiler(model, check, metrics)
        self._bounds = Bounds(settings.clip_max_tokens, settings.max_logprobs, settings.min_priority)

    async def chat(
        self, request: Request, body: ChatRequest, render: Render, *, clips: bool = False
    ) -> Response:
        """The reply to `body`, which begins when it is sent. `clips`: more tokens than fit are as many as
        fit, also where no setting says so. Raises ApiError, Overloaded, ClientGone."""
        model = self._model
        check_model(body.model, model)
        exchange_of(request).name(request_id_of(body))
        asked = asked_in_chat(body, clips=clips)
        check_tools(body.tools, body.tool_choice)
        tools = offered(body)
        fit = body.truncate_prompt_tokens is None
        rendering = self._begin(request, body, render)
        prompt = await self._prompts.of_messages(request, body, tools, fit=fit)
        prompt = truncated(prompt, body, asked, self._backend.limits())
        await self._prompts.check_messages(request, body, tools, prompt)
        grammar, calls, held = await self._structures.constrain_chat(request, body, prompt)
        told_apart = partial(
            answer_parser,
            body,
            prompt,
            model.forms,
            model.tokenizer,
            calls,
            held,
            constrained=constraint_of(body) is not None,
        )
        return await self._reply(request, body, asked, [prompt], rendering, grammar, told_apart)

    async def count(self, request: Request, body: ChatRequest) -> int:
        """The tokens of the prompt that `chat` would compute; it may be longer than any that fits. Raises as
        above."""
        check_model(body.model, self._model)
        check_tools(body.tools, body.tool_choice)
        return len(await self._prompts.of_messages(request, body, offered(body), fit=False))

    async def completion(self, request: Request, body: CompletionRequest, render: Render) -> Response:
        """As `chat`."""
        check_model(body.model, self._model)
        exchange_of(request).name(request_id_of(body))
        asked = asked_in_completion(body)
        rendering = self._begin(request, body, render)
        grammar = await self._structures.grammar(request, body)
        tokens = await self._prompts.of_texts(
            request,
            body.prompt,
            asked.prompt_param,
            add_special_tokens=body.add_special_tokens,
            fit=body.truncate_prompt_tokens is None,
        )
        tokens = [truncated(each, body, asked, self._backend.limits()) for each in tokens]
        self._prompts.check_texts(body.prompt, tokens, asked.prompt_param)
        whole = body.truncate_prompt_tokens is None
        given = body.prompt if whole else [None] * len(tokens)
        return await self._reply(request, body, asked, tokens, rendering, grammar, given=given)

    def _begin(self, request: Request, body: GenerationRequest, render: Render) -> Rendering:
        """Make the reply's rendering. A stream is kept alive from here on: what follows may take long."""
        rendering = render()
        if body.stream:
            silence_s = self._settings.stream_silence_s
            exchange_of(request).begin_events(rendering.framing, rendering.failure, silence_s)
        return rendering

    async def _reply(
        self,
        request: Request,
        body: GenerationRequest,
        asked: Asked,
        tokens: list[list[int]],
        rendering: Rendering,
        grammar: Grammar | None,
        told_apart: Callable[[], Heard | None] = lambda: None,
        given: Sequence[str | list[int] | None] = (None,),
    ) -> Response:
        """`given`: the prompts as they were sent, where that is what they are."""
        model, exchange, limits = self._model, exchange_of(request), self._backend.limits()
        settings = self._settings
        admitted = admit(
            body,
            asked,
            tokens,
            model,
            limits,
            exchange.request_id,
            exchange.trace,
            grammar,
            bounds=self._bounds,
            salt=salt_of(body.cache_salt, prefix_owner_in(request.scope)),
            tenant=tenant_of(request.scope, settings.tenant_header),
        )
        exchange.describe(lambda: _described(body, model, admitted))
        beginnings = await self._prompts.beginnings(request, body, [each.prompt for each in admitted], given)
        # Shared by a request's choices.
        begun = zip(admitted, beginnings, strict=True)
        answers = ((each, beginning) for each, beginning in begun for _ in range(each.choices))
        choices = [
            ChoiceAssembler(index, each, body, model.tokenizer, told_apart(), beginning)
            for index, (each, beginning) in enumerate(answers)
        ]
        logs = settings.log_prompts
        answering = PendingAnswer(
            backend=self._backend,
            choices=choices,
            rendering=rendering,
            metrics=self._metrics,
            exchange=exchange,
            transcript=Transcript(choices, model.tokenizer, exchange.names) if logs else None,
            given=body.n if answers_drawn(body) > body.n else None,
        )
        return StreamedReply(answering) if body.stream else WholeReply(answering)


def _described(
    body: GenerationRequest, model: ServedModel, admitted: Sequence[Admitted]
) -> dict[str, Attribute]:
    """What is asked for, in the words of OpenTelemetry's conventions for generative AI."""
    first = admitted[0]
    sampling = first.sampling
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
        "gen_ai.output.type": "json" if _wants_json(first.grammar) else "text",
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = float(sampling.top_k)
    if body.seed is not None:
        attributes["gen_ai.request.seed"] = body.seed
    if (given := len(admitted) * body.n) > 1:
        attributes["gen_ai.request.choice.count"] = given
    return attributes


def _wants_json(grammar: Grammar | None) -> bool:
    return grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
