"""Limits on one rendering by a chat template, which is a program that a model brings."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from jinja2 import nodes

ROUNDS_MAX: Final = 1_000_000
"""Most iterations of all loops in one rendering. A template needs a few tens of thousands for the most
messages that a request may have. A template that loops over all messages for each message would occupy a
thread for minutes."""
GROWTH_MAX: Final = 16
"""Factor by which the text of a message counts in the limit on the rendered prompt, because a chat template
may repeat it. Normal templates write a message once."""
FRAME_CHARS_MAX: Final = 1024
"""Allowance of characters that a chat template may write around one message. It counts in the limit on the
whole rendered text (`most_chars`)."""
FRAME_VALUE_CHARS: Final = 32
"""Characters that a number, boolean or null in the input of a template counts as."""
PREFACE_CHARS_MAX: Final = 2**20
"""Allowance of characters that a chat template may write in addition to the messages. It counts in the limit
on the whole rendered text (`most_chars`)."""
MESSAGE_EXTRAS: Final = ("tool_calls", "reasoning_content")
"""Fields of a message that a template renders in addition to the content."""
COUNTED: Final = "baton_counted"
"""Name of the template variable that holds `Iterations.counted`, the function that counts loop iterations."""


class ChatTemplateFailed(Exception):
    """Error: the model's chat template is faulty or exceeds its limits, and the operator has to fix it. The
    error's text contains nothing of the messages."""


class Iterations:
    """Counter of the loop iterations of one rendering. A time limit would need a thread that can be
    stopped."""

    def __init__(self) -> None:
        self._left = ROUNDS_MAX

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of one loop. Raises ChatTemplateFailed if all loops together have too many
        iterations."""
        for value in values:
            self._left -= 1
            if self._left < 0:
                raise ChatTemplateFailed(
                    f"the model's chat template loops more than {ROUNDS_MAX} times over these messages"
                )
            yield value


def compile_counting(environment: Any, template: str) -> Any:
    """Return the chat template compiled so that each of its loops counts its iterations
    (`Iterations.counted`)."""
    tree = environment.parse(template)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Call(nodes.Name(COUNTED, "load"), [loop.iter], [], None, None).set_lineno(
            loop.lineno
        )
    tree.set_environment(environment)
    return environment.from_string(tree)


def chars_in(value: Any) -> int:
    """Return the number of characters in a nested value. Strings count their length, and other values
    FRAME_VALUE_CHARS."""
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
    """Return the most characters that a chat template may write for these messages. A template that writes
    more is stopped."""
    chars = PREFACE_CHARS_MAX
    for message in messages:
        content = message["content"] or ""
        own = len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
        own += sum(chars_in(message[each]) for each in MESSAGE_EXTRAS if each in message)
        chars += own * GROWTH_MAX + FRAME_CHARS_MAX
    return chars
