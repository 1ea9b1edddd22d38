"""Answers are parsed by the response template that comes with a model."""

import json
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.backend import Limits
from baton.api.served_model import ServedModel
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.format_detection import model_formats
from baton.api.tools.parsing.output_parts import (
    CompleteToolCall,
    ContentDelta,
    OutputPart,
    ReasoningDelta,
    merge_parts,
)
from baton.api.tools.parsing.template_parser import TemplateParser, read_template, template_file
from baton.runtime.errors import StartupError
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, chat
from tests.api.scripted import ScriptedBackend, saying

SPEC: Final[dict[str, Any]] = {
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "thinking": {"open": "<hm>", "close": "</hm>"},
        "tool_calls": {
            "open": "<do>",
            "close": "</do>",
            "content": "json",
            "repeats": True,
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
        },
        "content": {},
    },
}
TOOLS: Final[list[dict[str, Any]]] = [{"type": "function", "function": {"name": "now"}}]
DO: Final = '<do>{"name": "now", "arguments": {"a": 1}}</do>'
NOW: Final = CompleteToolCall("now", '{"a": 1}')
PROMPT: Final = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


def parsed(pieces: list[str], prompt: str = PROMPT, tools: Any = TOOLS) -> tuple[list[OutputPart], int]:
    parser = TemplateParser(read_template(SPEC, "here"), prompt, tools)
    parts: list[OutputPart] = []
    for piece in pieces:
        parts += parser.push(piece)
    return merge_parts(parts + parser.flush()), parser.malformed_calls


@pytest.mark.parametrize(
    ("text", "prompt", "parts", "malformed_calls"),
    [
        (f"<hm>So.</hm>\n\nYes. {DO}", PROMPT, [ReasoningDelta("So."), ContentDelta("Yes. "), NOW], 0),
        ("So.</hm>Yes.", f"{PROMPT}<hm>", [ReasoningDelta("So."), ContentDelta("Yes.")], 0),
        ("So, no end", f"{PROMPT}<hm>", [ReasoningDelta("So, no end")], 0),
        ("Yes.", "no anchor", [ContentDelta("Yes.")], 0),
        (f"<<do>none</do><{DO}", PROMPT, [ContentDelta("<<do>none</do><"), NOW], 1),
        (f"<do>none</do> {DO}", PROMPT, [ContentDelta("<do>none</do> "), NOW], 1),
        ('<do>{"name"', PROMPT, [ContentDelta('<do>{"name"')], 1),
        (
            '<do>{"name": 5, "arguments": 6}</do>',
            PROMPT,
            [ContentDelta('<do>{"name": 5, "arguments": 6}</do>')],
            1,
        ),
    ],
)
def test_an_answer_is_parsed_by_its_template(
    text: str, prompt: str, parts: list[OutputPart], malformed_calls: int
) -> None:
    assert parsed([text], prompt) == (parts, malformed_calls)


def test_calls_that_nobody_offered_are_text() -> None:
    assert parsed([f"So {DO}"], tools=()) == ([ContentDelta(f"So {DO}")], 0)


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([DO, "<do>", "</do>", "<hm>", "</hm>", "a", " ", "<", "{}"]), max_size=8),
    cuts=st.lists(st.integers(0, 200), max_size=5),
)
def test_how_a_text_is_cut_changes_nothing(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    assert parsed([text[start:end] for start, end in pairwise(bounds)]) == parsed([text])


async def test_it_comes_with_the_tokenizer_or_in_a_file(backend: ScriptedBackend, tmp_path: Path) -> None:
    backend.known_limits = Limits(8192, 8192, 8192)
    backend.script = lambda _: saying(f"<hm>So.</hm>Yes. {DO}")
    file = tmp_path / "template.json"
    file.write_text(json.dumps(SPEC))
    own = copy(tiny.byte_level())
    own.response_template = SPEC
    for reference, setting in ((own, "auto"), (tiny.byte_level(), str(file))):
        tokenizer = Tokenizer(reference)
        forms = model_formats(tokenizer, "", setting)
        assert forms.names["calls"] == "response_template"
        served = ServedModel(tiny.MODEL, tokenizer, (tiny.END_ID,), len(reference), formats=forms)
        app = create_app(backend, served, CollectorRegistry())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            (choice,) = (await http.post(CHAT, json=chat(tools=TOOLS))).json()["choices"]
        message = choice["message"]
        assert (message["content"], message["reasoning_content"]) == ("Yes. ", "So.")
        assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": 1}'}
        assert choice["finish_reason"] == "tool_calls"


def test_a_file_that_is_none_is_an_error_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "template.json"
    for text in ("{", "[]", "{}", '{"fields": {"a": {"content": "no such"}}, "start_anchor": "x"}'):
        file.write_text(text)
        with pytest.raises(StartupError, match=r"template\.json: no response template: "):
            template_file(file)
    with pytest.raises(StartupError, match="no such file, and no such name: auto, "):
        model_formats(tiny.model().tokenizer, "", "hermess")
