"""Parser of answers by the response template that comes with a model.

`response_template` is a format of transformers, described in its documentation. The transformers library
parses an answer by it. The library gets one character at a time, so that the result does not depend on how
the text was cut into pieces. Text that it cannot parse is content.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from baton.api.tools.formats.json_calls import calls_of
from baton.api.tools.parsing.output_parts import (
    CompleteToolCall,
    ContentDelta,
    MalformedToolCall,
    OutputPart,
    ReasoningDelta,
    merge_parts,
)
from baton.runtime.errors import StartupError, describe_error

REASONING_FIELDS: Final = frozenset({"thinking", "reasoning", "reasoning_content", "thoughts"})
CALLS: Final = "tool_calls"
FILE_BYTES_MAX: Final = 2**20


ResponseTemplate = Any
"""Response template as the transformers library loads it. Its class is imported only where it is used."""


def read_template(template: Any, source: str) -> ResponseTemplate:
    """Return a model's response template as the transformers library loads it.

    `source`: name of the file or setting, for errors. Raises StartupError if it is not a response template.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        return load_response_template(template)
    except Exception as error:  # any error of the library
        raise StartupError(f"{source}: no response template: {describe_error(error)}") from error


def template_file(path: Path) -> ResponseTemplate:
    """Return the response template in a JSON file. Raises StartupError if the file does not contain one."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise StartupError(f"{path}: no response template: it has more than {FILE_BYTES_MAX} bytes")
        template = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: no response template: {describe_error(error)}") from error
    return read_template(template, str(path))


class TemplateParser:
    """Parser of one answer by a response template."""

    def __init__(
        self,
        template: ResponseTemplate,
        end_of_prompt: str,
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        """Start to parse an answer.

        `end_of_prompt`: text at the end of the prompt, in which the answer may have begun.
        `tools`: tools that may be called, in the form that chat templates take. Without any, tool calls are
        content.
        """
        self._template = template
        self._tools = [dict(tool) for tool in tools]
        begun = template.start_anchor_re.search(end_of_prompt) is not None
        self._parser = self._new(end_of_prompt if begun else "")
        self._raw = ""
        """Text of the answer since the last part that was returned, in case that it cannot be parsed and
        becomes content."""
        self._field: str | None = None
        self._fresh = False
        self.malformed_calls = 0
        self._note(self._parser.initial_events, [])

    @property
    def thinking(self) -> bool:
        return self._field in REASONING_FIELDS

    def push(self, text: str) -> list[OutputPart]:
        parts: list[OutputPart] = []
        for char in text:
            self._raw += char
            try:
                events = self._parser.feed(char)
            except Exception:  # any error of the library, since the text is unchecked
                self._give_up(parts)
            else:
                self._note(events, parts)
        return merge_parts(parts)

    def flush(self) -> list[OutputPart]:
        parts: list[OutputPart] = []
        try:
            _, events = self._parser.finalize()
        except Exception:  # among others a field that is missing
            if self._field == CALLS:
                self._give_up(parts)
        else:
            self._note(events, parts)
        return merge_parts(parts)

    def _give_up(self, parts: list[OutputPart]) -> None:
        """Return the unparsed text as content and count it as a malformed tool call. The text that comes next
        gets a new parser."""
        self.malformed_calls += 1
        parts.append(ContentDelta(self._raw))
        self._raw, self._field = "", None
        self._parser = self._new("")

    def _new(self, prefix: str) -> Any:
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self._template, prefix=prefix, tools=self._tools)

    def _note(self, events: Sequence[Mapping[str, Any]], parts: list[OutputPart]) -> None:
        for event in events:
            name = event["field"]
            match event["type"]:
                case "region_open":
                    self._field = name
                    if name not in (CALLS, self._template.implicit):
                        self._raw = ""
                case "region_chunk" if name != CALLS:
                    self._raw = self._raw[len(event["text"]) :]
                    self._write(
                        event["text"], parts, ReasoningDelta if name in REASONING_FIELDS else ContentDelta
                    )
                case "region_close":
                    if name == CALLS:
                        self._call(event["value"], parts)
                    if name != self._template.implicit:  # an implicit field ends at the next field's mark
                        self._raw = ""
                    self._field = None
                    self._fresh = self._fresh or name == CALLS or name in REASONING_FIELDS

    def _write(
        self, text: str, parts: list[OutputPart], part: type[ContentDelta] | type[ReasoningDelta]
    ) -> None:
        """Add a piece of text to the parts. Whitespace after a mark such as `</think>` is dropped."""
        text = text.lstrip() if self._fresh else text
        if text:
            self._fresh = False
            parts.append(part(text))

    def _call(self, value: Any, parts: list[OutputPart]) -> None:
        try:
            calls: Sequence[CompleteToolCall] = calls_of(value) if self._tools else ()
        except MalformedToolCall:
            self.malformed_calls += 1
            calls = ()
        parts += calls or [ContentDelta(self._raw)]
