"""How does a conversation become the prompt that the model was trained on?

By the model's own chat template, which is a program. What a message says is one text or several parts, and
not every template knows both: one that is given what it does not know writes Python's notation into the
prompt, or nothing. So each is asked once, for each role, which of them it shows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError, nodes

from services.runtime.errors import in_a_line

Content = str | list[str]
"""What a message says: a text, or the texts of its parts."""

FIRST: Final = "the-first"
SECOND: Final = "the-second"
OTHER: Final = "another"

ROUNDS_MAX: Final = 1_000_000
"""Of all loops of one rendering. A template takes a few tens of thousands for the most messages there may
be; one that goes through them again for each message would hold a thread for minutes."""
GROWTH_MAX: Final = 16
"""How often what it is given may stand in what it makes; a template says a message once."""
FRAME_CHARS_MAX: Final = 1024
"""That it may put around a message."""
PREFACE_CHARS_MAX: Final = 2**20
"""That it may say beside the messages."""
COUNTED: Final = "baton_counted"
"""Under which name a template knows what counts its rounds."""


class ChatTemplateMissing(Exception):
    """The model says nothing about how messages become a prompt."""


class ChatRefused(Exception):
    """The model's chat template does not take these messages; the text is the template's own."""


class ChatTemplateFailed(Exception):
    """The model's chat template fails, whatever the messages: whoever serves the model has to mend it. The
    text holds nothing of them."""


class Shows(NamedTuple):
    """What of a role's messages a template shows whole."""

    text: bool
    parts: bool


class ChatTemplate:
    """A model's. Immutable to its callers, safe in threads."""

    def __init__(self, reference: Any) -> None:
        """`reference` is a transformers tokenizer."""
        self._reference = reference
        self._shows: dict[str, Shows] = {}

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The prompt that it makes of `messages`, whose `content` is a `Content`.

        Raises ChatTemplateMissing, ChatRefused if the template rejects the messages by its own word
        (`raise_exception`), ChatTemplateFailed if it fails or does too much: it is a program of the model's.
        """
        template = self._reference.chat_template
        if template is None or (isinstance(template, dict) and "default" not in template):
            raise ChatTemplateMissing("this model has no chat template; use /v1/completions")
        shaped = [self._shaped(message) for message in messages]
        try:
            return self._render(messages=shaped, add_generation_prompt=add_generation_prompt)
        except ChatTemplateFailed:
            raise
        except Exception as error:
            if type(error) is TemplateError:  # what `raise_exception` raises; the others are subclasses of it
                raise ChatRefused(f"the model's chat template refuses these messages: {error}") from None
            # What other errors say may quote a message.
            said = f": {error}".splitlines()[0] if isinstance(error, TemplateError) else ""
            raise ChatTemplateFailed(
                f"the model's chat template fails ({type(error).__name__}{said})"
            ) from None

    def check(self) -> None:
        """Raises ChatTemplateFailed where there is a template that does not compile: it renders nothing."""
        template = self._reference.chat_template
        if template is None or (isinstance(template, dict) and "default" not in template):
            return
        try:
            self._render  # noqa: B018 - compiled when it is first asked for
        except TemplateSyntaxError as error:
            raise ChatTemplateFailed(f"line {error.lineno}: {error.message}") from error
        except TemplateError as error:
            raise ChatTemplateFailed(in_a_line(error)) from error

    @cached_property
    def _template(self) -> str:
        template: str = self._reference.get_chat_template()
        return template

    @cached_property
    def _render(self) -> Callable[..., str]:
        """The chat template, of `messages` and `add_generation_prompt`. The library's own way from them to
        the text copies and walks all messages twice, for shapes that none of ours has."""
        try:
            from transformers.utils.chat_template_utils import _compile_jinja_template
        except ImportError:  # it is private, and may go
            return lambda messages, **asked: self._reference.apply_chat_template(
                messages, tokenize=False, **asked
            )
        special = dict(self._reference.special_tokens_map)
        compiled = _counting(_compile_jinja_template(self._template).environment, self._template)

        def render(messages: Sequence[Mapping[str, Any]], **asked: Any) -> str:
            rounds = _Rounds()
            chars, most, texts = 0, _most_chars(messages), []
            said = {**special, COUNTED: rounds.counted, "tools": None, "documents": None}
            for text in compiled.generate(messages=messages, **said, **asked):
                chars += len(text)
                if chars > most:
                    raise ChatTemplateFailed(f"the model's chat template makes more than {most} characters")
                texts.append(text)
            return "".join(texts)

        return render

    def _shaped(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """As the template takes it. OpenAI renamed `system` to `developer`; a template that never heard of
        it gets `system`."""
        role, content = message["role"], message["content"]
        if role == "developer" and "developer" not in self._template:
            role = "system"
        shows = self._shows.get(role)
        if shows is None:
            shows = self._shows[role] = self._shown(role)
        if isinstance(content, str):
            content = content if shows.text or not shows.parts else _parts([content])
        else:
            content = _parts(content) if shows.parts else "".join(content)
        return {**message, "role": role, "content": content}

    def _shown(self, role: str) -> Shows:
        """By trying. Parts are not shown whole where only the first is, or where one of them is not what its
        text is; and nothing is, if the template fails."""
        text = self._tried(role, FIRST)
        part = self._tried(role, _parts([FIRST]))
        both = self._tried(role, _parts([FIRST, SECOND]))
        as_text = FIRST in text
        as_part = part == text if as_text else FIRST in part
        return Shows(as_text, as_part and FIRST in both and SECOND in both)

    def _tried(self, role: str, content: Any) -> str:
        message = {"role": role, "content": content}
        user = {"role": "user", "content": OTHER if isinstance(content, str) else _parts([OTHER])}
        beside = {"user": [message], "assistant": [user, message]}
        try:
            return self._render(messages=beside.get(role, [message, user]), add_generation_prompt=False)
        except Exception:
            return ""


def _parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


class _Rounds:
    """Of the loops of one rendering. Ending it by the clock would need a thread that can be ended."""

    def __init__(self) -> None:
        self._left = ROUNDS_MAX

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """Raises ChatTemplateFailed."""
        for value in values:
            self._left -= 1
            if self._left < 0:
                raise ChatTemplateFailed(
                    f"the model's chat template loops more than {ROUNDS_MAX} times over these messages"
                )
            yield value


def _counting(environment: Any, template: str) -> Any:
    """The template, compiled so that each of its loops is over what `_Rounds.counted` makes of it."""
    tree = environment.parse(template)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Call(nodes.Name(COUNTED, "load"), [loop.iter], [], None, None).set_lineno(
            loop.lineno
        )
    tree.set_environment(environment)
    return environment.from_string(tree)


def _most_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    chars = PREFACE_CHARS_MAX
    for message in messages:
        said = message["content"]
        own = len(said) if isinstance(said, str) else sum(len(part["text"]) for part in said)
        chars += own * GROWTH_MAX + FRAME_CHARS_MAX
    return chars
