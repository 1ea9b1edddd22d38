"""Chat templates, which turn a conversation into the prompt format that the model was trained on.

A model brings its own chat template, which is a program. The content of a message is one text or several
parts, and not every template supports both forms. A template that gets an unsupported form writes Python's
notation into the prompt, or nothing. So each template is tried once with test messages, for each role, to
learn which forms it renders.
"""

import hashlib
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError

from baton.api.text.template_limits import (
    COUNTED,
    GROWTH_MAX,
    ChatTemplateFailed,
    Iterations,
    chars_in,
    compile_counting,
    most_chars,
)
from baton.api.tools.tool_prompt import with_calls_as_text, with_results_as_text, with_tool_prompt
from baton.runtime.errors import describe_error

FIRST: Final = "the-first"
SECOND: Final = "the-second"
OTHER: Final = "another"

REASONING: Final = "reasoning_content"
REASONING_ALIASES: Final = ("reasoning", "thinking")
"""Other names by which chat templates read a message's `reasoning_content`."""
TOOL_USE: Final = "tool_use"
"""Name of the template for requests with tools, in a model that has several chat templates."""
KEY: Final = "the-key"
CALL_ID: Final = "call_0123456789abcdef"
SHORT_ID_CHARS: Final = 9


class ChatTemplateMissing(Exception):
    """Error: the model has no chat template, so it cannot serve chats."""


class MessagesRefused(Exception):
    """Error: the model's chat template rejects these messages. Its text is the template's own."""


class Shows(NamedTuple):
    """Forms of a message's content (one text, list of parts) that a chat template renders completely, for one
    role."""

    text: bool
    parts: bool


NO_WORDS: Final[Mapping[str, Any]] = {}


class Calls(NamedTuple):
    """Form in which a chat template expects the tool calls of earlier turns. It is found by trying
    the forms."""

    objects: bool
    """Whether the template needs a tool call's arguments as an object. Otherwise it needs JSON text."""
    content: str | None
    """Content that the template needs in an assistant's message that has only tool calls: None or ""."""
    short_ids: bool
    """Whether the ids of calls have nine letters and digits, as Mistral's templates require."""


class ChatTemplate:
    """A model's chat template. Immutable to its callers, and safe to use from several threads."""

    def __init__(self, reference: Any, named: str | None = None, text: str | None = None) -> None:
        """Wrap the chat template of `reference`, a transformers tokenizer.

        `named`: name of the template, if the tokenizer has several. `text`: source of another template to use
        instead.
        """
        self._reference = reference
        self._named = named
        self._own = text
        self._shows: dict[str, Shows] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, Any]] = (),
        words: Mapping[str, Any] = NO_WORDS,
        continues: bool = False,
    ) -> str:
        """Return the text of the prompt for `messages`.

        The content of a message is a `Content`, and its `tool_calls` are as `chat_input` makes them. Tools,
        calls and results that the template does not support are written as text. `words`: further template
        variables. `continues`: the prompt ends within the last message.

        Raises ChatTemplateMissing. Raises MessagesRefused if the template rejects the messages
        (`raise_exception`), and ChatTemplateFailed if it fails or exceeds its limits.
        """
        if not self._is_there:
            raise ChatTemplateMissing("this model has no chat template; use /v1/completions")
        if tools and self._for_tools is not None:
            return self._for_tools.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=documents,
                words=words,
                continues=continues,
            )
        end = f"the-end-{secrets.token_hex(8)}"
        known = self._in_words(ending(messages, end) if continues else messages, tools)
        shaped = [self._shaped(message) for message in known]
        variables: dict[str, Any] = {**words, "add_generation_prompt": add_generation_prompt}
        variables |= {"tools": tools} if tools and self.knows_tools else {}
        variables |= {"documents": documents} if documents else {}
        try:
            text = self._render(messages=shaped, **variables)
        except ChatTemplateFailed:
            raise
        except Exception as error:
            if type(error) is TemplateError:  # raised by `raise_exception`; other errors are subclasses
                raise MessagesRefused(f"the model's chat template refuses these messages: {error}") from None
            # The text of other errors may quote a message.
            said = f": {error}".splitlines()[0] if isinstance(error, TemplateError) else ""
            raise ChatTemplateFailed(
                f"the model's chat template fails ({type(error).__name__}{said})"
            ) from None
        if not continues:
            return text
        before, found, _ = text.rpartition(end)
        if not found:
            raise MessagesRefused("the model's chat template does not show the end of the last message")
        return before

    def check(self) -> None:
        """Raise ChatTemplateFailed if the template does not compile. Nothing is rendered."""
        if not self._is_there:
            return
        try:
            self._render  # noqa: B018 - compiled on first use
        except TemplateSyntaxError as error:
            raise ChatTemplateFailed(f"line {error.lineno}: {error.message}") from error
        except TemplateError as error:
            raise ChatTemplateFailed(describe_error(error)) from error

    def other(self, text: str) -> "ChatTemplate":
        """Return a chat template with the source `text` for the same model."""
        return ChatTemplate(self._reference, text=text)

    @property
    def _is_there(self) -> bool:
        told = self._reference.chat_template
        return self._own is not None or not (
            told is None or (isinstance(told, dict) and "default" not in told)
        )

    @property
    def text(self) -> str:
        """Source of the template; "" if the model has none."""
        if not self._is_there:
            return ""
        return self._template if self._for_tools is None else self._template + self._for_tools.text

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template renders the definitions of tools."""
        if self._for_tools is not None:
            return self._for_tools.knows_tools
        return FIRST in self._tried_with([_user(OTHER)], [_tool(FIRST)])

    @cached_property
    def _for_tools(self) -> "ChatTemplate | None":
        several = self._reference.chat_template
        if (
            self._named is not None
            or self._own is not None
            or not isinstance(several, dict)
            or TOOL_USE not in several
        ):
            return None
        return ChatTemplate(self._reference, TOOL_USE)

    @cached_property
    def _calls(self) -> Calls | None:
        """Form in which the template renders tool calls, found by trying all forms. None: it renders no
        calls."""
        ways = itertools.product((True, False), (None, ""), (False, True))
        for calls in (Calls(*way) for way in ways):
            text = self._tried_with(_called(calls), [_tool(FIRST)])
            nulls = text.count(NOTHING) - self._tried_with([_user(OTHER)], [_tool(FIRST)]).count(NOTHING)
            if FIRST in text and KEY in text and nulls < 1 and not any(wrong in text for wrong in WRONG):
                return calls
        return None

    @cached_property
    def _results(self) -> bool:
        """Whether the chat template renders the results of tool calls, found by trying test messages."""
        if self._calls is None:
            return False
        result = {"role": "tool", "content": SECOND, "tool_call_id": _id(CALL_ID, self._calls)}
        return SECOND in self._tried_with([*_called(self._calls), result], [_tool(FIRST)])

    @cached_property
    def _has_system(self) -> bool:
        shows = self._shown("system")
        return shows.text or shows.parts

    def _in_words(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Return the messages for the chat template, with tools, tool calls and tool results written as text
        if the template does not support them."""
        if any(message["role"] == "tool" for message in messages) and not self._results:
            messages = with_results_as_text(messages)
        if any("tool_calls" in message for message in messages) and self._calls is None:
            messages = with_calls_as_text(messages)
        if tools and not self.knows_tools:
            messages = with_tool_prompt(messages, tools, has_system=self._has_system)
        return messages

    @cached_property
    def _template(self) -> str:
        if self._own is not None:
            return self._own
        template: str = self._reference.get_chat_template(self._named)
        return template

    @cached_property
    def _render(self) -> Callable[..., str]:
        """The compiled template: a function from `messages` and variables to text. The function of
        transformers copies and traverses all messages twice, for forms of messages that do not occur here."""
        try:
            from transformers.utils.chat_template_utils import _compile_jinja_template
        except ImportError:  # it is private, and may be removed
            return lambda messages, **variables: self._reference.apply_chat_template(
                messages, tokenize=False, chat_template=self._template, **variables
            )
        special = dict(self._reference.special_tokens_map)
        compiled = compile_counting(_compile_jinja_template(self._template).environment, self._template)

        def render(messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
            iterations = Iterations()
            chars, most, texts = 0, most_chars(messages) + GROWTH_MAX * chars_in(variables), []
            said = {**special, "tools": None, "documents": None, **variables, COUNTED: iterations.counted}
            for text in compiled.generate(messages=messages, **said):
                chars += len(text)
                if chars > most:
                    raise ChatTemplateFailed(f"the model's chat template makes more than {most} characters")
                texts.append(text)
            return "".join(texts)

        return render

    def _shaped(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message in the form that the template supports. OpenAI renamed the role `system` to
        `developer`: a template that does not support the new name gets `system`."""
        role, content = message["role"], message["content"]
        if role == "developer" and "developer" not in self._template:
            role = "system"
        shows = self._shows.get(role)
        if shows is None:
            shows = self._shows[role] = self._shown(role)
        calls = message.get("tool_calls")
        if content is None:
            content = "" if not calls or self._calls is None else self._calls.content
        elif isinstance(content, str):
            content = content if shows.text or not shows.parts else _parts([content])
        else:
            content = _parts(content) if shows.parts else "".join(content)
        shaped = {**message, "role": role, "content": content}
        if (reasoning := message.get(REASONING)) is not None:
            for name in REASONING_ALIASES:
                # gpt-oss' template refuses a call with both a content and reasoning.
                if name in self._template and not (name == "thinking" and calls and content):
                    shaped[name] = reasoning
        if "tool_call_id" in message and self._calls is not None:
            shaped["tool_call_id"] = _id(message["tool_call_id"], self._calls)
        if calls and self._calls is not None:
            shaped["tool_calls"] = [_shaped_call(call, self._calls) for call in calls]
        return shaped

    def _shown(self, role: str) -> Shows:
        """Return which forms of a role's content the template renders, found by trying test messages.

        Parts do not count as rendered if only the first part is, or if a single part is rendered differently
        from the same text. A template that fails renders neither form.
        """
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
        if role == "tool" and self._calls is not None:
            message["tool_call_id"] = _id(CALL_ID, self._calls)
            beside["tool"] = [*_called(self._calls), message]
        return self._tried_with(beside.get(role, [message, user]), ())

    def _tried_with(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that the chat template renders for test messages. Return "" if it fails."""
        variables = {"tools": tools} if tools else {}
        try:
            return self._render(messages=messages, add_generation_prompt=False, **variables)
        except Exception:
            return ""


WRONG: Final = (f"'{KEY}'", f'\\"{KEY}')
"""Pieces of rendered text which show that a chat template got tool-call arguments as an object instead of
JSON text, or the reverse."""
NOTHING: Final = "None"
"""Piece of rendered text which shows that a chat template was given None where it needs a text."""


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ending(messages: Sequence[Mapping[str, Any]], end: str) -> list[Mapping[str, Any]]:
    """Return chat messages with the text `end` appended to the content of the last one."""
    last = messages[-1]
    content = last["content"]
    said = (
        [*content[:-1], content[-1] + end]
        if isinstance(content, list) and content
        else f"{content or ''}{end}"
    )
    return [*messages[:-1], {**last, "content": said}]


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {OTHER: {"type": "string"}}}
    function = {"name": name, "description": OTHER, "parameters": parameters}
    return {"type": "function", "function": function}


def _called(calls: Calls) -> list[dict[str, Any]]:
    """Return test messages that contain a tool call in the form `calls`."""
    function = {"name": FIRST, "arguments": {KEY: OTHER} if calls.objects else f'{{"{KEY}": "{OTHER}"}}'}
    call = {"id": _id(CALL_ID, calls), "type": "function", "function": function}
    return [_user(OTHER), {"role": "assistant", "content": calls.content, "tool_calls": [call]}]


def _id(own: str, calls: Calls) -> str:
    """Return the id of a tool call as the chat template accepts it: unchanged, or a hash if ids must be
    short. Equal ids stay equal."""
    if not calls.short_ids or (len(own) == SHORT_ID_CHARS and own.isalnum()):
        return own
    return hashlib.sha256(own.encode()).hexdigest()[:SHORT_ID_CHARS]


def _shaped_call(call: Mapping[str, Any], calls: Calls) -> dict[str, Any]:
    function = call["function"]
    arguments = call["object"] if calls.objects else function["arguments"]
    return {
        "id": _id(call["id"], calls),
        "type": call["type"],
        "function": {**function, "arguments": arguments},
    }


def _parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
