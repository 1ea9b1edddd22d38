"""Which tokens does the model read? Rendered and tokenised without holding up other requests."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from services.openai.backend import Overloaded
from services.openai.chat_template import ChatRefused, ChatTemplateMissing
from services.openai.errors import from_backend, invalid
from services.openai.schemas import Message
from services.openai.tokenizer import Tokenizer

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

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
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


def _plain(message: Message) -> dict[str, Any]:
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": message.content, **named}
