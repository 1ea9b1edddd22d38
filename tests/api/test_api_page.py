"""Tests that docs/api.md names every field and route that is served, ignored or refused."""

import re
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.messages.message_request import MESSAGES_UNSUPPORTED, MessagesRequest
from baton.api.requests.schema_fields import fields_of
from baton.api.requests.schemas import (
    ChatRequest,
    CompletionRequest,
    Message,
    Sampled,
    StreamOptions,
    StructuredOutputs,
)
from baton.api.requests.unsupported_fields import HARMLESS, IGNORED
from baton.api.responses.response_request import ResponsesRequest
from baton.api.responses.response_unsupported import HARMLESS as HARMLESS_THERE
from baton.api.responses.response_unsupported import IGNORED as IGNORED_THERE
from baton.api.settings import ApiSettings
from baton.api.tools.formats.output_formats import TOOL_CALL_FORMATS, format_names
from baton.web.bounded_http import BoundedHttp
from tests.api import tiny
from tests.api.scripted import ScriptedBackend

PAGE: Final = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


SECTIONS: Final = (
    "Fields of both generating routes",
    "Tools",
    "Reasoning",
    "Fields of the chat template",
    "Fields of vLLM and SGLang",
)


def _section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def _words(text: str) -> set[str]:
    return {word for quoted in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", quoted)}


def test_every_field_that_is_read_is_named() -> None:
    fields = {
        name
        for shape in (ChatRequest, CompletionRequest, Message, StreamOptions)
        for name in shape.model_fields
    }
    told = "".join(map(_section, SECTIONS))
    assert fields - _words(told) <= {"prompt", "role", "content"}


def test_every_field_of_the_responses_api_is_named() -> None:
    told = _words(_section("The Responses API") + _section("Fields of vLLM and SGLang"))
    assert {*ResponsesRequest.model_fields, *HARMLESS_THERE, *IGNORED_THERE} <= told


def test_what_holds_where_nothing_is_asked_is_what_the_code_says() -> None:
    told = dict(re.findall(r"`(\w+)` (−?\d+)", _section("Defaults")))
    assert {name: float(value.replace("−", "-")) for name, value in told.items()} == {
        name: field.default
        for name, field in ChatRequest.model_fields.items()
        if type(field.default) in (int, float) and name not in ("min_tokens", "priority")
    }


def test_what_has_no_effect_and_what_is_refused_is_what_the_code_says() -> None:
    assert _words(_section("Taken without effect")) - {"null"} == IGNORED
    rows = re.findall(r"^\| (`.*?) \|", _section("Refused by name"), re.MULTILINE)
    inner = ("any other", "message role")
    named = {word for row in rows if not any(each in row for each in inner) for word in _words(row)}
    assert named == set(HARMLESS)


def test_the_fields_of_anthropics_api_are_named() -> None:
    told = _words(_section("Anthropic's API"))
    fields = {name for names in fields_of(MessagesRequest).values() for name in names}
    parts = {"id", "input", "data", "text", "content", "role", "tool_use_id", "caller", "citations"}
    shared = {*Sampled.model_fields, *fields_of(StructuredOutputs)[""]}
    assert fields - shared - parts - {"schema", "toolset_name"} <= told
    assert {*MESSAGES_UNSUPPORTED.ignored, *MESSAGES_UNSUPPORTED.harmless} <= told


def test_every_way_of_reading_calls_is_named() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| ", _section("Tools"), re.MULTILINE)
    assert {word for row in rows for cell in row for word in re.findall(r"`([^`]+)`", cell)} >= {
        *format_names(TOOL_CALL_FORMATS)
    }


def test_every_route_is_named() -> None:
    registry = CollectorRegistry()
    create_app(ScriptedBackend(), tiny.model(), registry)
    [counted] = [family for family in registry.collect() if family.name == "baton_http_requests"]
    served = {sample.labels["route"].partition("/{")[0] for sample in counted.samples} - {"none"}
    told = set(re.findall(r"/[\w/]*", _section("What is served")))
    assert "/v1/chat/completions" in served, "its series is not there before the first request"
    assert served <= told


def test_its_times_are_the_settings() -> None:
    settings = ApiSettings()
    text = " ".join(PAGE.split())
    assert f"did not arrive within {settings.body_timeout_s:g} s" in text
    assert f"reads nothing for {BoundedHttp.stalled_s:g} s" in text
