"""Which tokens does the model read? Rendered and tokenised without holding up other requests."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from services.openai.backend import Overloaded
from services.openai.chat_template import ChatRefused, ChatTemplateFailed, ChatTemplateMissing
from services.openai.errors import SERVER, ApiError, from_backend, invalid, shown
from services.openai.model import ServedModel
from services.openai.schemas import Message

INLINE_CHARS_MAX: Final = 4096
"""Texts up to this length (about 2 ms) are tokenised in the event loop: a thread costs more."""
FRAME_CHARS: Final = 32
"""That a template puts around a message, about."""
THREADS: Final = 2
"""Tokenising releases the interpreter lock; more threads would only take cores from the event loop."""
WAITING_MAX: Final = 64
"""Long texts that are being tokenised or wait for it."""
RETRY_AFTER_S: Final = 1

T = TypeVar("T")


class Prompts:
    """Makes prompts of what callers send. One for the application; its threads end with the process."""

    def __init__(self, model: ServedModel) -> None:
        self._tokenizer = model.tokenizer
        self._vocabulary = model.vocabulary
        self._waiting = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")

    async def of_messages(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """The token ids of a conversation, by the model's chat template. Raises ApiError."""
        plain: list[Mapping[str, Any]] = [_plain(message) for message in messages]

        def work() -> list[int]:
            text = self._tokenizer.render_chat(plain, add_generation_prompt=add_generation_prompt)
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

        try:
            return await self._run(sum(_chars(message) for message in messages), work)
        except ChatTemplateMissing as error:
            raise invalid("messages", f"{error}.", "unsupported_value") from None
        except ChatRefused as error:
            raise invalid("messages", f"{error}.") from None
        except ChatTemplateFailed as error:
            raise _operators(str(error)) from None

    async def of_texts(
        self, prompts: Sequence[str | list[int]], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """The token ids of each prompt; token ids stay as they are."""

        def work() -> list[list[int]]:
            return [
                self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        return await self._run(sum(len(each) for each in prompts if isinstance(each, str)), work)

    async def check_messages(self, messages: Sequence[Message], ids: Sequence[int]) -> None:
        """Raise ApiError for the first token of a conversation that the model does not have, a tokenizer's
        being more than a model's: a client's that wrote it, whose text is named, or the operator's whose
        template did."""
        if (id_ := self._foreign(ids)) is None:
            return
        texts = [text for message in messages for text in _texts(message)]
        places = [place for at, message in enumerate(messages) for place in _places(at, message)]
        place = await self._run(sum(map(len, texts)), lambda: self._first_with(texts, id_))
        if place is None:
            raise _operators(f"the model's chat template writes {self._shown(id_)}")
        raise self._not_the_models(places[place], id_)

    def check_texts(
        self, prompts: Sequence[str | list[int]], tokens: Sequence[Sequence[int]], param: str
    ) -> None:
        """The same of prompts; token ids that a client gave are not looked at."""
        for place, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True)):
            if isinstance(prompt, str) and (id_ := self._foreign(ids)) is not None:
                raise self._not_the_models(param if len(prompts) == 1 else f"{param}[{place}]", id_)

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

    async def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return await self._run(len(ids), lambda: self._tokenizer.decode(ids, skip_special_tokens=False))

    async def spellings_of(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return await self._run(len(ids), lambda: [self._tokenizer.piece(id_) for id_ in ids])

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_CHARS_MAX:
            return work()
        if self._waiting >= WAITING_MAX:
            raise from_backend(Overloaded("too many long prompts are waiting to be tokenised", RETRY_AFTER_S))
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1


def _chars(message: Message) -> int:
    """Of what a template may make of it, at a guess."""
    said = message.content
    chars = len(said) if isinstance(said, str) else sum(len(part) + FRAME_CHARS for part in said)
    return chars + len(message.name or "") + FRAME_CHARS


def _texts(message: Message) -> list[str]:
    """All that it says, as `_places` names them."""
    said = [message.content] if isinstance(message.content, str) else list(message.content)
    return said if message.name is None else [*said, message.name]


def _places(at: int, message: Message) -> list[str]:
    """Of the message at `at`: the path of each of its texts."""
    here = f"messages[{at}]"
    if isinstance(message.content, str):
        said = [f"{here}.content"]
    else:
        said = [f"{here}.content[{part}].text" for part in range(len(message.content))]
    return said if message.name is None else [*said, f"{here}.name"]


def _operators(what: str) -> ApiError:
    """500: no client can mend it."""
    return ApiError(
        500,
        f"{what[:1].upper()}{what[1:]}. Whoever serves the model has to mend it; until then there is"
        " /v1/completions.",
        kind=SERVER,
        code="chat_template_failed",
    )


def _plain(message: Message) -> dict[str, Any]:
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": message.content, **named}
