"""Recorded outputs of real models are parsed as canitoolcall expects, whole and streamed in any pieces.

canitoolcall has 469 raw outputs of models of nine families, each with what a correct parser makes of it.
`NOT_STRICT` lists those that are parsed otherwise. An entry that begins to pass fails the test, too.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Final, cast

from baton.api.generation.choice_assembler import AnswerParsing
from baton.api.requests.meaning_reader import chat_meaning
from baton.api.requests.schemas import ChatRequest
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.format_detection import ModelFormats, answer_parser
from baton.api.tools.formats.output_formats import REASONING_FORMATS, TOOL_CALL_FORMATS, find_format
from baton.api.tools.parsing.output_parts import (
    CompleteToolCall,
    ContentDelta,
    OutputPart,
    ReasoningDelta,
    merge_parts,
)

checks: Final[Any] = import_module("canitoolcall.checks")
fixtures: Final[Any] = import_module("canitoolcall.fixtures")
results: Final[Any] = import_module("canitoolcall.results")

FORMATS: Final[Mapping[str, tuple[str, str]]] = {
    "deepseek": ("deepseek", "think"),
    "gemma4": ("gemma", "gemma"),
    "glm": ("glm45", "think"),
    "gpt-oss": ("harmony", "harmony"),
    "kimi": ("kimi", "think"),
    "llama": ("llama3", "none"),
    "mistral": ("mistral", "mistral"),
    "qwen3-hermes": ("hermes", "think"),
    "qwen3-xml": ("qwen3_coder", "think"),
}
"""Tool call format and reasoning format by family."""
MODEL_FORMATS: Final[Mapping[str, tuple[str, str]]] = {
    "Llama-4": ("pythonic", "none"),
    "DeepSeek-V3.2": ("deepseek_v32", "think"),
    "DeepSeek-V4": ("deepseek_v4", "think"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
}
"""Tool call format and reasoning format of models that differ from their family."""
RANDOM_SPLITS: Final = 3
PIECE_MAX: Final = 12
A_SPACE: Final = "soft_pass", "a space before a call is content, which other recorded outputs have so"
CUT: Final = "fail", "what is cut off is content, so that nothing of an answer is lost"
NOT_STRICT: Final[Mapping[str, tuple[str, str]]] = {
    "gemma4/truncated-second-parallel-call": CUT,
    "gemma4/vllm-text-before-call": A_SPACE,
    "glm/glm45-vllm-newline-format-content-before": A_SPACE,
    "gpt-oss/harmony-marker-in-reasoning": ("fail", "only the tokens tell its marks from text"),
    "gpt-oss/llamacpp-builtin-python-recipient": ("fail", "a message to a tool that is none is content"),
    "kimi/k2i-vllm-noise-between-markers": ("fail", "text beside calls is content"),
    "kimi/k3-bug-truncated-reasoning-recorded": ("soft_pass", "whitespace behind reasoning is layout"),
    "qwen3-hermes/sglang-text-before-call-with-space": A_SPACE,
    "qwen3-hermes/truncated-second-parallel-call": CUT,
    "qwen3-xml/bug-coder-text-after-call": ("fail", "content before and behind a call is kept apart"),
}
"""Status and reason of outputs that are not parsed strictly as expected, by id."""
STRICT_MIN: Final = 440


@dataclass(frozen=True)
class FakeTokenizer:
    """A tokenizer whose every prompt decodes to one text."""

    prompt: str
    special: Mapping[int, str] = field(default_factory=dict)

    def decode(self, _: Sequence[int], **__: Any) -> str:
        return self.prompt


@cache
def recorded() -> tuple[Any, ...]:
    return tuple(fixtures.load_fixtures())


@cache
def families() -> Mapping[str, Any]:
    return cast(Mapping[str, Any], fixtures.load_families())


def request_of(fixture: Any) -> ChatRequest:
    """Return a request with the fixture's tools. Their names may be ones that the API refuses."""
    tools = [{**tool, "function": {**tool["function"], "name": "tool"}} for tool in fixture.tools]
    for index, tool in enumerate(tools):
        tool["function"]["name"] += str(index)
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "?"}], "tools": tools or None}
    )
    for offered, own in zip(body.tools, fixture.tools, strict=True):
        object.__setattr__(offered.function, "name", own["function"]["name"])
    return body


def parser_of(fixture: Any) -> AnswerParsing | None:
    """Return the parser of the fixture's model, for its tools and its prompt."""
    formats = FORMATS[fixture.family]
    for part, own in MODEL_FORMATS.items():
        if part in fixture.reference_model:
            formats = own
    calls, reasoning = formats
    prompt = fixture.generation_prompt
    if prompt is None:
        model = families()[fixture.family].reference_for(fixture.reference_model)
        prompt = model.default_generation_prompt or ""
    body = request_of(fixture)
    forms = ModelFormats(find_format(calls, TOOL_CALL_FORMATS), find_format(reasoning, REASONING_FORMATS))
    return answer_parser(
        chat_meaning(body), [0], forms, cast(Tokenizer, FakeTokenizer(prompt)), forms.calls, None
    )


def parsed(fixture: Any, pieces: Sequence[str]) -> Any:
    """Return what Baton makes of an output that comes in these pieces."""
    parser = parser_of(fixture)
    parts: list[OutputPart] = [ContentDelta("".join(pieces))]
    if parser is not None:
        parts = [part for piece in pieces for part in parser.parser.push(piece)] + parser.parser.flush()
    return results.ParseResult(
        content="".join(part.text for part in parts if isinstance(part, ContentDelta)) or None,
        reasoning_content="".join(part.text for part in parts if isinstance(part, ReasoningDelta)) or None,
        tool_calls=tuple(
            results.ParsedToolCall(part.name, part.arguments)
            for part in merge_parts(parts)
            if isinstance(part, CompleteToolCall)
        ),
    )


def splits(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the text by characters and in random pieces, with a name for each."""
    yield "char", list(text)
    for seed in range(RANDOM_SPLITS):
        chance = random.Random(seed)
        pieces, rest = [], text
        while rest:
            count = chance.randint(1, PIECE_MAX)
            pieces.append(rest[:count])
            rest = rest[count:]
        yield f"pieces-{seed}", pieces


@cache
def outcomes() -> Mapping[str, tuple[str, Any]]:
    """Return each fixture's status and observation, by its id."""
    found = {}
    for fixture in recorded():
        streams = {name: parsed(fixture, pieces) for name, pieces in splits(fixture.raw_output)}
        seen = results.Observation(nonstream=parsed(fixture, [fixture.raw_output]), streams=streams)
        rows = checks.run_checks(fixture, families()[fixture.family], seen)
        found[fixture.id] = checks.case_status(rows).value, seen
    return found


def test_recorded_outputs_are_parsed_as_expected_but_for_a_list() -> None:
    counts = Counter(status for status, _ in outcomes().values())
    others = {id_: status for id_, (status, _) in outcomes().items() if status != "pass"}
    assert others == {id_: status for id_, (status, _) in NOT_STRICT.items()}, counts
    assert counts.total() == 469
    assert counts["pass"] >= STRICT_MIN


def test_a_streamed_output_is_parsed_as_the_whole_one() -> None:
    for id_, (_, seen) in outcomes().items():
        for split, streamed in seen.streams.items():
            assert streamed == seen.nonstream, (id_, split)


def test_no_argument_of_a_recorded_call_is_changed_or_cut() -> None:
    """A call may be missing where the list says so. One that is returned is as the model wrote it."""
    for fixture in recorded():
        expected = checks.expected_as_result(fixture.expected).tool_calls if fixture.expected else ()
        written = [(call.name, checks.canonical_arguments(call.arguments_raw)) for call in expected]
        for call in outcomes()[fixture.id][1].nonstream.tool_calls:
            assert (call.name, checks.canonical_arguments(call.arguments_raw)) in written, fixture.id
