"""Encoder of prompts: renders chats by the chat template, and tokenises texts in threads if they are long.

A text that cannot fit the context is refused by its length before it is tokenised, if the tokenizer has a
bound of characters per token.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeVar

from pydantic_core import to_json
from starlette.requests import Request

from baton.api.backend import Backend
from baton.api.errors import SERVER, ApiError, invalid, shown, too_long
from baton.api.generation.prompt_echo import PromptEcho
from baton.api.http.authentication import caller_in
from baton.api.http.disconnect import UntilDisconnect
from baton.api.model_interface import Model
from baton.api.requests.chat_messages import chat_input, texts_of
from baton.api.requests.meaning import OfferedTool
from baton.api.requests.schemas import ChatRequest, CompletionRequest, Conversation, GenerationRequest
from baton.api.text.chat_template import (
    ChatTemplate,
    ChatTemplateMissing,
    MessagesRefused,
)
from baton.api.text.detokenizer import Detokenizer
from baton.api.text.template_limits import ChatTemplateFailed
from baton.api.text.tokenizer import Tokenizer, TooManyTokens
from baton.api.text.tokenizer_pool import LONG_BYTES, FairThreadPool
from baton.rooms.plurals import counted

INLINE_CHARS_MAX: Final = 4096
"""Size in bytes up to which texts are tokenised in the event loop. That takes about 2 ms, which is less than
the cost of a thread."""
COUNTED_CONTEXTS: Final = 4
"""Longest prompt, as a multiple of the context, that is tokenised although it does not fit. Such a prompt is
only counted, or is truncated afterwards."""

READS_TIME: Final = "strftime_now"
"""Name of the function by which chat templates read the time."""

T = TypeVar("T")


class PromptEncoder:
    """Encoder of the prompts of one HTTP application into token ids. Its threads end with the process."""

    def __init__(
        self, model: Model, backend: Backend, *, takes_templates: bool = False, writes_tools: bool = True
    ) -> None:
        """Make an encoder with its own thread pool.

        `takes_templates`: whether clients may send a chat template. `writes_tools`: whether tools are written
        into the system message if the chat template supports none. Otherwise such a request is refused.
        """
        self._tokenizer = model.tokenizer
        self._vocabulary = model.vocabulary
        self._writes_tools = writes_tools
        self._takes_templates = takes_templates
        self._backend = backend
        self._pool = FairThreadPool()

    async def of_messages(
        self,
        request: Request,
        body: Conversation,
        tools: Sequence[OfferedTool],
        *,
        fit: bool = True,
        now_s: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, rendered by the chat template.

        `fit`: refuse a prompt that is longer than the context. Otherwise the limit is COUNTED_CONTEXTS times
        as long. `now_s`: time that the template reads, seconds since the epoch; None for the present. Raises
        ApiError, Overloaded, ClientGone.
        """
        given = chat_input(body, tools)
        most, own = self._most(fit=fit), body.chat_template
        chat = self._tokenizer.chat if own is None else self._other(own)
        words = given.words
        if now_s is not None and READS_TIME in chat.text:
            words = {**words, READS_TIME: partial(_format_time, now_s)}
        if given.documents and "documents" not in chat.text:
            why = "'documents': the model's chat template knows none."
            raise invalid("documents", why, "unsupported_value")
        if tools and not (self._writes_tools or chat.knows_tools):
            raise invalid("tools", "'tools': the model's chat template knows no tools.", "unsupported_value")

        def ids_of(text: str) -> list[int]:
            return self._encode(text, "messages", most, add_special_tokens=bool(body.add_special_tokens))

        def rendered() -> str | list[int]:
            """Render the chat and return its token ids. A text that is too long for this thread is returned
            as it is, to be tokenised in another thread."""
            text = chat.render(
                given.messages,
                add_generation_prompt=given.add_generation_prompt,
                tools=given.tools,
                documents=given.documents,
                words=words,
                continues=given.continues,
            )
            self._check_length(text, "messages", most)
            return text if _size(text) > LONG_BYTES else ids_of(text)

        # A chat template that a client sent may run for long, so it never runs in the event loop.
        chars = given.chars if own is None else given.chars + len(own) + INLINE_CHARS_MAX
        try:
            made = await self._run(request, min(chars, LONG_BYTES), rendered)
        except ChatTemplateMissing as error:
            raise invalid("messages", f"{error}.", "unsupported_value") from None
        except MessagesRefused as error:
            raise invalid("messages", f"{error}.") from None
        except ChatTemplateFailed as error:
            if own is not None:
                raise invalid("chat_template", f"'chat_template' cannot be used: {error}.") from None
            raise _template_failed(str(error)) from None
        if isinstance(made, str):
            text = made
            made = await self._run(request, _size(text), lambda: ids_of(text))
        return made

    def _other(self, text: str) -> ChatTemplate:
        """Return the chat template that a client sent with its request. `text`: source of the template.
        Raises ApiError if the settings do not allow it."""
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
        """Return the token ids of each prompt of a completion request. Prompts that are token ids already are
        returned unchanged. `param`: name of the field that holds them, for errors. `fit`: as in
        `of_messages`. Raises ApiError, Overloaded, ClientGone."""
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
        return context if fit else COUNTED_CONTEXTS * context

    def _check_length(self, text: str, param: str, most: int) -> None:
        """Raise ApiError if a text is so long that it must have more than `most` tokens, before it is
        tokenised. `param`: name of the field that holds the text."""
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
        self, request: Request, body: Conversation, tools: Sequence[OfferedTool], ids: Sequence[int]
    ) -> None:
        """Raise ApiError for the first token of a conversation that the model's vocabulary does not have.

        A tokenizer may have more tokens than its model. The error names the request field that contains the
        token. If the chat template wrote the token, the error is a 500, because only the operator can fix it.
        `ids`: token ids of the rendered conversation.
        """
        if (id_ := self._foreign(ids)) is None:
            return
        named = [
            each for at, message in enumerate(body.messages) for each in texts_of(message, f"messages[{at}]")
        ]
        named += [(tool.param, to_json(tool.template).decode()) for tool in tools]
        named += [(f"documents[{at}]", to_json(each).decode()) for at, each in enumerate(body.documents)]
        named.append(("chat_template_kwargs", to_json(body.chat_template_kwargs).decode()))
        texts = [text for _, text in named]
        place = await self._run(request, sum(map(_size, texts)), lambda: self._first_with(texts, id_))
        if place is None:
            raise _template_failed(f"the model's chat template writes {self._shown(id_)}")
        raise self._not_the_models(named[place][0], id_)

    def check_texts(
        self, prompts: Sequence[str | list[int]], tokens: Sequence[Sequence[int]], param: str
    ) -> None:
        """Raise ApiError for the first token of a text prompt that the model's vocabulary does not have.
        Prompts that a client sent as token ids are not checked here. `tokens`: token ids of each prompt."""
        for prompt, ids, name in zip(prompts, tokens, _params(param, len(prompts)), strict=True):
            if isinstance(prompt, str) and (id_ := self._foreign(ids)) is not None:
                raise self._not_the_models(name, id_)

    def _foreign(self, ids: Sequence[int]) -> int | None:
        if not ids or max(ids) < self._vocabulary:
            return None
        return next(each for each in ids if each >= self._vocabulary)

    def _first_with(self, texts: Sequence[str], id_: int) -> int | None:
        """Return the index of the text that contains a token. Return None if no text contains it.

        At the edge of a text, the token may form only together with the neighbouring text. So texts are also
        searched for the token's spelling.
        """
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
        """Return the text of token ids, including the texts of special tokens."""
        return await self._run(
            request, len(ids), lambda: self._tokenizer.decode(ids, skip_special_tokens=False)
        )

    async def spellings_of(self, request: Request, ids: Sequence[int]) -> list[str]:
        """Return the spelling of each token in the tokenizer's vocabulary."""
        return await self._run(request, len(ids), lambda: [self._tokenizer.piece(id_) for id_ in ids])

    async def echoes(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        given: Sequence[str | list[int] | None],
    ) -> list[PromptEcho | None]:
        """Return the echo of each prompt, or None if the request asks for none. `prompts`: token ids of each
        prompt. `given`: each prompt as the client sent it, or None if it was truncated."""
        has_text = isinstance(body, CompletionRequest) and body.echo
        return await self._run(
            request,
            sum(map(len, prompts)) if has_text else 0,
            lambda: [
                echo_of(body, prompt, each, self._tokenizer)
                for prompt, each in zip(prompts, given, strict=True)
            ],
        )

    async def _run(self, request: Request, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`. It runs in a thread if `size` exceeds INLINE_CHARS_MAX, and otherwise
        at once in the event loop. `size`: bytes of text to process, or an estimate. Raises Overloaded,
        ClientGone."""
        if size <= INLINE_CHARS_MAX:
            return work()
        with UntilDisconnect(request.scope, request.receive):
            return await self._pool.run(caller_in(request.scope), size, work)


def _format_time(now_s: int, form: str) -> str:
    """Return a time in local form, as transformers' own `strftime_now` does. `now_s`: seconds since the
    epoch. `form`: format of `strftime`."""
    return datetime.fromtimestamp(now_s, UTC).astimezone().strftime(form)


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _params(param: str, count: int) -> list[str]:
    return [param] if count == 1 else [f"{param}[{place}]" for place in range(count)]


def _assistant_text(body: ChatRequest) -> str | None:
    """Return the text of the last message if its role is assistant. Otherwise return None."""
    last = body.messages[-1]
    return "".join(last.content or ()) if last.role == "assistant" else None


def _template_failed(what: str) -> ApiError:
    """Return the error with HTTP status 500 for a chat template that failed, which only the operator can fix.
    `what`: description of the failure."""
    return ApiError(
        500,
        f"{what[:1].upper()}{what[1:]}. Whoever serves the model has to mend it; until then there is"
        " /v1/completions.",
        kind=SERVER,
        code="chat_template_failed",
    )


def echo_of(
    body: GenerationRequest, prompt: Sequence[int], given: str | list[int] | None, tokenizer: Tokenizer
) -> PromptEcho | None:
    """Return the text and log-probabilities that the response shows of a prompt. Return None if the request
    asks for neither.

    `prompt`: token ids of the prompt. `given`: the prompt as the client sent it, or None if it was truncated.
    """
    if isinstance(body, ChatRequest):
        text = _assistant_text(body) if body.echo else None
        return None if text is None and body.prompt_logprobs is None else PromptEcho(prompt, text)
    if not isinstance(body, CompletionRequest) or not body.echo:
        return None if body.prompt_logprobs is None else PromptEcho(prompt)
    detokenizer = Detokenizer(
        tokenizer.codec,
        (),
        skip_special_tokens=isinstance(given, str),
        whole_texts=tokenizer.whole_texts,
    )
    texts, offsets, chars = [], [], 0
    for token in prompt:
        offsets.append(chars)
        texts.append(detokenizer.push(token))
        chars += len(texts[-1])
    text = given if isinstance(given, str) else "".join([*texts, detokenizer.flush()])
    offsets = [min(each, len(text)) for each in offsets]
    return PromptEcho(prompt, text, offsets, is_alone=body.max_tokens == 0)
