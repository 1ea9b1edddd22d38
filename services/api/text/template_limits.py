"""Bounds of one rendering by a chat template, which is a program that a model brings."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from jinja2 import nodes

ROUNDS_MAX: Final = 1_000_000
"""Most iterations of all loops of one rendering. A template takes a few tens of thousands for the most
messages that a request may have. One with a loop over them for each message would occupy a thread for
minutes."""
GROWTH_MAX: Final = 16
"""Most times that its input may appear in its output. A template writes a message once."""
FRAME_CHARS_MAX: Final = 1024
"""Most characters that it may put around a message."""
FRAME_VALUE_CHARS: Final = 32
"""Characters that a number or a word of JSON counts as."""
PREFACE_CHARS_MAX: Final = 2**20
"""Most characters that it may write in addition to the messages."""
MESSAGE_EXTRAS: Final = ("tool_calls", "reasoning_content")
"""Fields of a message that a template shows, in addition to its content."""
COUNTED: Final = "baton_counted"
"""Name of the template's variable that counts its iterations."""


class ChatTemplateFailed(Exception):
    """The model's chat template fails, whatever the messages. The operator has to fix it. The error's text
    holds nothing of the messages."""


class Iterations:
    """Counts the iterations of one rendering. A time-out would need a thread that can be stopped."""

    def __init__(self) -> None:
        self._left = ROUNDS_MAX

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values. Raises ChatTemplateFailed for too many iterations."""
        for value in values:
            self._left -= 1
            if self._left < 0:
                raise ChatTemplateFailed(
                    f"the model's chat template loops more than {ROUNDS_MAX} times over these messages"
                )
            yield value


def compile_counting(environment: Any, template: str) -> Any:
    """Return the template, compiled so that each of its loops iterates by `Iterations.counted`."""
    tree = environment.parse(template)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Call(nodes.Name(COUNTED, "load"), [loop.iter], [], None, None).set_lineno(
            loop.lineno
        )
    tree.set_environment(environment)
    return environment.from_string(tree)


def chars_in(value: Any) -> int:
    """Return the characters of all strings in a value."""
    chars, pending = 0, [value]
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            pending += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            pending += each
        else:
            chars += len(each) if isinstance(each, str) else FRAME_VALUE_CHARS
    return chars


def most_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the most characters that a template may make of messages."""
    chars = PREFACE_CHARS_MAX
    for message in messages:
        content = message["content"] or ""
        own = len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
        own += sum(chars_in(message[each]) for each in MESSAGE_EXTRAS if each in message)
        chars += own * GROWTH_MAX + FRAME_CHARS_MAX
    return chars
