"""How does a conversation become the prompt that the model was trained on?

By the model's own chat template, which is a program. What a message says is one text or several parts, and
not every template knows both: one that is given what it does not know writes Python's notation into the
prompt, or nothing. So each is asked once, for each role, which of them it shows.
"""

import hashlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError, nodes

from baton.api.tools.tool_prompt import with_calls_as_text, with_results_as_text, with_tool_prompt
from baton.runtime.errors import in_a_line

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
FRAME_VALUE_CHARS: Final = 32
"""As which a number or a word of JSON counts."""
PREFACE_CHARS_MAX: Final = 2**20
"""That it may say beside the messages."""
THOUGHT: Final = "reasoning_content"
THOUGHTS_AS: Final = ("reasoning", "thinking")
"""Under which other names templates know it."""
BESIDE: Final = ("tool_calls", THOUGHT)
"""What else a message says."""
TOOL_USE: Final = "tool_use"
"""Among several templates of a model, the one for when there are tools."""
KEY: Final = "the-key"
CALL_ID: Final = "call_0123456789abcdef"
SHORT_ID_CHARS: Final = 9
COUNTED: Final = "baton_counted"
"""Under which name a template knows what counts its rounds."""


class ChatTemplateMissing(Exception):
    """The model says nothing about how messages become a prompt."""


class MessagesRefused(Exception):
    """The model's chat template does not take these messages; the text is the template's own."""


class ChatTemplateFailed(Exception):
    """The model's chat template fails, whatever the messages: whoever serves the model has to mend it. The
    text holds nothing of them."""


class Shows(NamedTuple):
    """What of a role's messages a template shows whole."""

    text: bool
    parts: bool


NO_WORDS: Final[Mapping[str, Any]] = {}


class Calls(NamedTuple):
    """How a template takes the calls of earlier turns."""

    objects: bool
    """Their arguments as objects, not as JSON in a text."""
    content: str | None
    """Of a message that says nothing beside them."""
    short_ids: bool
    """Their ids have nine letters and digits, as Mistral's."""


class ChatTemplate:
    """A model's. Immutable to its callers, safe in threads."""

    def __init__(self, reference: Any, named: str | None = None, text: str | None = None) -> None:
        """`reference` is a transformers tokenizer; `named`: which of its several templates; `text`: another
        one."""
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
        """The prompt that it makes of `messages`, whose `content` is a `Content`, and whose `tool_calls` are
        those of `conversation.plain`. Tools, calls and results that it does not know are told in words.
        `words`: what it may ask for beside all that; `continues`: the prompt ends within the last message.

        Raises ChatTemplateMissing, MessagesRefused if the template rejects the messages by its own word
        (`raise_exception`), ChatTemplateFailed if it fails or does too much: it is a program of the model's.
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
        asked: dict[str, Any] = {**words, "add_generation_prompt": add_generation_prompt}
        asked |= {"tools": tools} if tools and self.knows_tools else {}
        asked |= {"documents": documents} if documents else {}
        try:
            text = self._render(messages=shaped, **asked)
        except ChatTemplateFailed:
            raise
        except Exception as error:
            if type(error) is TemplateError:  # what `raise_exception` raises; the others are subclasses of it
                raise MessagesRefused(f"the model's chat template refuses these messages: {error}") from None
            # What other errors say may quote a message.
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
        """Raises ChatTemplateFailed where there is a template that does not compile: it renders nothing."""
        if not self._is_there:
            return
        try:
            self._render  # noqa: B018 - compiled when it is first asked for
        except TemplateSyntaxError as error:
            raise ChatTemplateFailed(f"line {error.lineno}: {error.message}") from error
        except TemplateError as error:
            raise ChatTemplateFailed(in_a_line(error)) from error

    def other(self, text: str) -> "ChatTemplate":
        """Another template of the same model."""
        return ChatTemplate(self._reference, text=text)

    @property
    def _is_there(self) -> bool:
        told = self._reference.chat_template
        return self._own is not None or not (
            told is None or (isinstance(told, dict) and "default" not in told)
        )

    @property
    def text(self) -> str:
        """The template; "" for none."""
        if not self._is_there:
            return ""
        return self._template if self._for_tools is None else self._template + self._for_tools.text

    @cached_property
    def knows_tools(self) -> bool:
        """Whether it shows the tools that it is given."""
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
        """By trying; None: it does not show them."""
        ways = itertools.product((True, False), (None, ""), (False, True))
        for calls in (Calls(*way) for way in ways):
            text = self._tried_with(_called(calls), [_tool(FIRST)])
            nulls = text.count(NOTHING) - self._tried_with([_user(OTHER)], [_tool(FIRST)]).count(NOTHING)
            if FIRST in text and KEY in text and nulls < 1 and not any(wrong in text for wrong in WRONG):
                return calls
        return None

    @cached_property
    def _results(self) -> bool:
        """Whether it shows what a tool answers."""
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
        """`messages`, in which what the template does not know is told in its place."""
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
        """The chat template, of `messages` and `add_generation_prompt`. The library's own way from them to
        the text copies and walks all messages twice, for shapes that none of ours has."""
        try:
            from transformers.utils.chat_template_utils import _compile_jinja_template
        except ImportError:  # it is private, and may go
            return lambda messages, **asked: self._reference.apply_chat_template(
                messages, tokenize=False, chat_template=self._template, **asked
            )
        special = dict(self._reference.special_tokens_map)
        compiled = _counting(_compile_jinja_template(self._template).environment, self._template)

        def render(messages: Sequence[Mapping[str, Any]], **asked: Any) -> str:
            rounds = _Rounds()
            chars, most, texts = 0, _most_chars(messages) + GROWTH_MAX * _chars_in(asked), []
            said = {**special, "tools": None, "documents": None, **asked, COUNTED: rounds.counted}
            for text in compiled.generate(messages=messages, **said):
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
        calls = message.get("tool_calls")
        if content is None:
            content = "" if not calls or self._calls is None else self._calls.content
        elif isinstance(content, str):
            content = content if shows.text or not shows.parts else _parts([content])
        else:
            content = _parts(content) if shows.parts else "".join(content)
        shaped = {**message, "role": role, "content": content}
        if (thought := message.get(THOUGHT)) is not None:
            for name in THOUGHTS_AS:
                # gpt-oss' template refuses a call with a content and a thought.
                if name in self._template and not (name == "thinking" and calls and content):
                    shaped[name] = thought
        if "tool_call_id" in message and self._calls is not None:
            shaped["tool_call_id"] = _id(message["tool_call_id"], self._calls)
        if calls and self._calls is not None:
            shaped["tool_calls"] = [_shaped_call(call, self._calls) for call in calls]
        return shaped

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
        if role == "tool" and self._calls is not None:
            message["tool_call_id"] = _id(CALL_ID, self._calls)
            beside["tool"] = [*_called(self._calls), message]
        return self._tried_with(beside.get(role, [message, user]), ())

    def _tried_with(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """ "" where it fails."""
        asked = {"tools": tools} if tools else {}
        try:
            return self._render(messages=messages, add_generation_prompt=False, **asked)
        except Exception:
            return ""


WRONG: Final = (f"'{KEY}'", f'\\"{KEY}')
"""What a template writes that was given an object for a text, or a text for an object."""
NOTHING: Final = "None"
"""And that was given nothing for a text."""


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ending(messages: Sequence[Mapping[str, Any]], end: str) -> list[Mapping[str, Any]]:
    """`end` behind what the last of them says."""
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
    """A call in the form that is tried."""
    function = {"name": FIRST, "arguments": {KEY: OTHER} if calls.objects else f'{{"{KEY}": "{OTHER}"}}'}
    call = {"id": _id(CALL_ID, calls), "type": "function", "function": function}
    return [_user(OTHER), {"role": "assistant", "content": calls.content, "tool_calls": [call]}]


def _id(own: str, calls: Calls) -> str:
    """As the template takes it; the same for a call and for its result, whoever made it."""
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


def _chars_in(value: Any) -> int:
    """Of all texts in it."""
    chars, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            waiting += each
        else:
            chars += len(each) if isinstance(each, str) else FRAME_VALUE_CHARS
    return chars


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
        said = message["content"] or ""
        own = len(said) if isinstance(said, str) else sum(len(part["text"]) for part in said)
        own += sum(_chars_in(message[each]) for each in BESIDE if each in message)
        chars += own * GROWTH_MAX + FRAME_CHARS_MAX
    return chars
