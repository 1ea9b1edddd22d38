"""Which tokens does the model read? Rendered and tokenised without holding up other requests.

What cannot fit is refused before it is tokenised, as far as its length tells.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic_core import to_json
from starlette.requests import Request

from baton.api.backend import Backend
from baton.api.errors import SERVER, ApiError, invalid, shown, too_long
from baton.api.generation.prompt_echo import PromptEcho, prompt_echo_of
from baton.api.http.authentication import caller_in
from baton.api.http.disconnect import unless_gone
from baton.api.requests.chat_messages import (
    check_end,
    check_turns,
    joined_turns,
    plain,
    plain_tools,
    texts_of,
    words_of,
)
from baton.api.requests.schemas import (
    CompletionRequest,
    Conversation,
    GenerationRequest,
    Message,
    Tool,
    thought_of,
)
from baton.api.served_model import ServedModel
from baton.api.text.chat_template import (
    ChatTemplate,
    ChatTemplateFailed,
    ChatTemplateMissing,
    MessagesRefused,
)
from baton.api.text.tokenizer import TooManyTokens
from baton.api.text.tokenizer_pool import LONG_BYTES, FairThreadPool
from baton.rooms.plurals import counted

INLINE_CHARS_MAX: Final = 4096
"""Texts up to this length (about 2 ms) are tokenised in the event loop: a thread costs more."""
FRAME_CHARS: Final = 32
"""That a template puts around a message, about."""
BEYOND: Final = 4
"""Times the context: so many tokens are counted where none of them is to be computed."""

T = TypeVar("T")


class PromptEncoder:
    """Makes prompts of what callers send. One for the application; its threads end with the process."""

    def __init__(self, model: ServedModel, backend: Backend, *, takes_templates: bool = False) -> None:
        """`takes_templates`: callers may send a chat template of their own."""
        self._tokenizer = model.tokenizer
        self._vocabulary = model.vocabulary
        self._forms = model.forms
        self._takes_templates = takes_templates
        self._backend = backend
        self._turns = FairThreadPool()

    async def of_messages(
        self,
        request: Request,
        body: Conversation,
        tools: Sequence[Tool],
        *,
        fit: bool = True,
    ) -> list[int]:
        """The token ids of a conversation, by the model's chat template. `fit`: what does not fit the context
        is refused, else what is much more. Raises ApiError, Overloaded, ClientGone."""
        check_turns(body.messages)
        check_end(body)
        most, messages, own = self._most(fit=fit), body.messages, body.chat_template
        chat = self._tokenizer.chat if own is None else self._other(own)
        if body.documents and "documents" not in chat.text:
            why = "'documents': the model's chat template knows none."
            raise invalid("documents", why, "unsupported_value")
        if tools and not (self._forms.describes_tools or chat.knows_tools):
            raise invalid("tools", "'tools': the model's chat template knows no tools.", "unsupported_value")
        told: list[Mapping[str, Any]] = [plain(message) for message in joined_turns(messages)]
        offered = plain_tools(tools)

        def ids_of(text: str) -> list[int]:
            return self._encode(text, "messages", most, add_special_tokens=bool(body.add_special_tokens))

        def rendered() -> str | list[int]:
            """The token ids, or a text that is one of the longest."""
            text = chat.render(
                told,
                add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
                tools=offered,
                documents=body.documents,
                words=words_of(body),
                continues=body.continue_final_message,
            )
            self._check_length(text, "messages", most)
            return text if _size(text) > LONG_BYTES else ids_of(text)

        try:
            chars = sum(_chars(message) for message in messages)
            chars += sum(map(_chars_of_json, (*offered, *body.documents)))
            if own is not None:  # what nobody has looked at holds up nobody
                chars += len(own) + INLINE_CHARS_MAX
            made = await self._run(request, min(chars, LONG_BYTES), rendered)
        except ChatTemplateMissing as error:
            raise invalid("messages", f"{error}.", "unsupported_value") from None
        except MessagesRefused as error:
            raise invalid("messages", f"{error}.") from None
        except ChatTemplateFailed as error:
            if own is not None:
                raise invalid("chat_template", f"'chat_template' cannot be used: {error}.") from None
            raise _operators(str(error)) from None
        if isinstance(made, str):
            text = made
            made = await self._run(request, _size(text), lambda: ids_of(text))
        return made

    def _other(self, text: str) -> ChatTemplate:
        """A caller's. Raises ApiError."""
        if not self._takes_templates:
            why = "'chat_template' is not supported; --trust-request-chat-template takes it."
            raise invalid("chat_template", why, "unsupported_parameter")
        return self._tokenizer.chat.other(text)

    async def of_texts(
        self,
        request: Request,
        prompts: Sequence[str | list[int]],
        param: str,
        *,
        add_special_tokens: bool = True,
        fit: bool = True,
    ) -> list[list[int]]:
        """The token ids of each prompt; token ids stay as they are. Raises as above."""
        most = self._most(fit=fit)
        params = _params(param, len(prompts))
        texts = [(each, name) for each, name in zip(prompts, params, strict=True) if isinstance(each, str)]
        for text, name in texts:
            self._check_length(text, name, most)

        def work() -> list[list[int]]:
            return [
                self._encode(prompt, name, most, add_special_tokens=add_special_tokens)
                if isinstance(prompt, str)
                else prompt
                for prompt, name in zip(prompts, params, strict=True)
            ]

        return await self._run(request, sum(_size(text) for text, _ in texts), work)

    def _most(self, *, fit: bool) -> int:
        context = self._backend.limits().context_tokens
        return context if fit else BEYOND * context

    def _check_length(self, text: str, param: str, most: int) -> None:
        """Raise ApiError for a text that has more tokens however it is tokenised."""
        if len(text) > INLINE_CHARS_MAX and (least := self._tokenizer.least_tokens(text)) > most:
            raise self._too_many(param, f"at least {counted(least, 'token')}")

    def _encode(self, text: str, param: str, most: int, *, add_special_tokens: bool) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, most=most)
        except TooManyTokens as error:
            tokens = counted(error.tokens, "token")
            raise self._too_many(param, tokens if error.counted_all else f"more than {tokens}") from None

    def _too_many(self, param: str, tokens: str) -> ApiError:
        context = self._backend.limits().context_tokens
        return too_long(param, context, f"'{param}' has {tokens}, and there has to be room for the answer")

    async def check_messages(
        self, request: Request, body: Conversation, tools: Sequence[Tool], ids: Sequence[int]
    ) -> None:
        """Raise ApiError for the first token of a conversation that the model does not have, a tokenizer's
        being more than a model's: a client's that wrote it, whose text is named, or the operator's whose
        template did."""
        if (id_ := self._foreign(ids)) is None:
            return
        said = [
            each for at, message in enumerate(body.messages) for each in texts_of(message, f"messages[{at}]")
        ]
        said += [(f"tools[{at}]", tool.model_dump_json()) for at, tool in enumerate(tools)]
        said += [(f"documents[{at}]", to_json(each).decode()) for at, each in enumerate(body.documents)]
        said.append(("chat_template_kwargs", to_json(body.chat_template_kwargs).decode()))
        texts = [text for _, text in said]
        place = await self._run(request, sum(map(_size, texts)), lambda: self._first_with(texts, id_))
        if place is None:
            raise _operators(f"the model's chat template writes {self._shown(id_)}")
        raise self._not_the_models(said[place][0], id_)

    def check_texts(
        self, prompts: Sequence[str | list[int]], tokens: Sequence[Sequence[int]], param: str
    ) -> None:
        """The same of prompts; token ids that a client gave are not looked at."""
        for prompt, ids, name in zip(prompts, tokens, _params(param, len(prompts)), strict=True):
            if isinstance(prompt, str) and (id_ := self._foreign(ids)) is not None:
                raise self._not_the_models(name, id_)

    def _foreign(self, ids: Sequence[int]) -> int | None:
        if not ids or max(ids) < self._vocabulary:
            return None
        return next(each for each in ids if each >= self._vocabulary)

    def _first_with(self, texts: Sequence[str], id_: int) -> int | None:
        """Which of them holds the token; at a text's edge it may be one beside another alone."""
        for place, text in enumerate(texts):
            if id_ in self._tokenizer.encode(text, add_special_tokens=False):
                return place
        piece = self._tokenizer.piece(id_)
        return next((place for place, text in enumerate(texts) if piece in text), None)

    def _shown(self, id_: int) -> str:
        piece = shown(self._tokenizer.piece(id_))
        return f"the token {piece!r}, which its tokenizer has and the model does not have"

    def _not_the_models(self, param: str, id_: int) -> ApiError:
        return invalid(param, f"Invalid value for '{param}': it holds {self._shown(id_)}.")

    async def text_of(self, request: Request, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return await self._run(
            request, len(ids), lambda: self._tokenizer.decode(ids, skip_special_tokens=False)
        )

    async def spellings_of(self, request: Request, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return await self._run(request, len(ids), lambda: [self._tokenizer.piece(id_) for id_ in ids])

    async def beginnings(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        given: Sequence[str | list[int] | None],
    ) -> list[PromptEcho | None]:
        """What is told of each prompt with its answers. `given`: as of `prompt_echo_of`, of each."""
        spelled = isinstance(body, CompletionRequest) and body.echo
        return await self._run(
            request,
            sum(map(len, prompts)) if spelled else 0,
            lambda: [
                prompt_echo_of(body, prompt, each, self._tokenizer)
                for prompt, each in zip(prompts, given, strict=True)
            ],
        )

    async def _run(self, request: Request, size: int, work: Callable[[], T]) -> T:
        """`size`: bytes of text, or about as much work as that."""
        if size <= INLINE_CHARS_MAX:
            return work()
        turn = self._turns.run(caller_in(request.scope), size, work)
        return await unless_gone(request.scope, request.receive, turn)


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _params(param: str, count: int) -> list[str]:
    return [param] if count == 1 else [f"{param}[{place}]" for place in range(count)]


def _chars(message: Message) -> int:
    """Of what a template may make of it, at a guess."""
    said = message.content or ""
    chars = len(said) if isinstance(said, str) else sum(len(part) + FRAME_CHARS for part in said)
    chars += len(thought_of(message) or "") + sum(
        len(call.function.arguments) + FRAME_CHARS for call in message.tool_calls
    )
    return chars + len(message.name or "") + FRAME_CHARS


def _chars_of_json(value: Mapping[str, Any]) -> int:
    return len(to_json(value))


def _operators(what: str) -> ApiError:
    """500: no client can mend it."""
    return ApiError(
        500,
        f"{what[:1].upper()}{what[1:]}. Whoever serves the model has to mend it; until then there is"
        " /v1/completions.",
        kind=SERVER,
        code="chat_template_failed",
    )
