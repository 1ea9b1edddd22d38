"""One row of the table of behaviours, and how it is sent to the application."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import httpx
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.backend import Limits
from baton.api.http.middleware import ApiMiddleware
from baton.api.served_model import ServedModel
from baton.api.settings import ApiSettings
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.format_detection import model_formats
from baton.grammars.grammar_compiler import compile_grammar
from baton.grammars.vocabulary import vocabulary_of
from baton.rooms.request import FinishReason, Request
from tests.api import tiny
from tests.api.scripted import ScriptedBackend, Step, batch, in_turn

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LIMITS: Final = Limits(context_tokens=2048, prompt_tokens=2048, sequence_tokens=2048)
DRAWN_MAX: Final = 300
"""Most tokens of constrained output."""
THINKING: Final = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{{ reasoning_effort or '' }}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TEMPLATES: Final[Mapping[str, str]] = {"plain": tiny.CHAT_TEMPLATE, "thinks": THINKING}
USER: Final[Mapping[str, Any]] = {"role": "user", "content": "hi"}
BASE: Final[Mapping[str, Mapping[str, Any]]] = {
    CHAT: {"model": tiny.MODEL, "messages": [USER]},
    COMPLETIONS: {"model": tiny.MODEL, "prompt": "The fox"},
    RESPONSES: {"model": tiny.MODEL, "input": "hi"},
    MESSAGES: {"model": tiny.MODEL, "messages": [USER], "max_tokens": 400},
    "/v1/messages/count_tokens": {"model": tiny.MODEL, "messages": [USER]},
}
"""Body of each route, beside which a row has its own fields."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal that names the request's field at fault, or None if it names no field."""

    param: str | None
    status: int = 400
    why: str = "not served"


@dataclass
class Answer:
    """Response to one request, and what reached the backend."""

    status: int
    body: Any
    events: list[Any]
    done: bool
    headers: Mapping[str, str]
    requests: list[Request]
    """Requests that reached the backend."""

    @property
    def choices(self) -> list[Any]:
        """Whole choices, joined from the events of a stream."""
        if not self.events:
            return list(self.body["choices"])
        whole: dict[int, dict[str, Any]] = {}
        for event in self.events:
            for choice in event.get("choices", ()):
                _add(whole.setdefault(choice["index"], {}), deepcopy(choice))
        return [whole[index] for index in sorted(whole)]

    @property
    def choice(self) -> Any:
        return self.choices[0]

    @property
    def message(self) -> Any:
        return self.choice["message"] if "message" in self.choice else self.choice["delta"]

    @property
    def text(self) -> Any:
        return self.choice["text"] if "text" in self.choice else self.message.get("content")

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """Names and arguments of tool calls. The arguments have to be JSON."""
        calls = [call["function"] for call in self.message.get("tool_calls") or ()]
        return [(call["name"], json.loads(call["arguments"])) for call in calls]

    @property
    def usage(self) -> Any:
        return next(event["usage"] for event in reversed(self.events)) if self.events else self.body["usage"]

    @property
    def request(self) -> Request:
        return self.requests[0]

    @property
    def prompt(self) -> str:
        """Rendered prompt, as the model gets it."""
        return tiny.model().tokenizer.decode(self.requests[0].prompt, skip_special_tokens=False)

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]


def _add(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add a delta to what came before it."""
    for name, value in piece.items():
        before = whole.get(name)
        if before is None or name in ("index", "role", "id", "type", "finish_reason", "stop_reason"):
            whole[name] = value if value is not None or name not in whole else before
        elif isinstance(value, str):
            whole[name] = before + value
        elif isinstance(value, dict):
            _add(before, value)
        elif isinstance(value, list) and name == "tool_calls":
            for call in value:
                known = {each["index"]: each for each in before}
                if call["index"] in known:
                    _add(known[call["index"]], call)
                else:
                    before.append(call)
        elif isinstance(value, list):
            before.extend(value)


Check = Callable[[Answer], Any]


@dataclass(frozen=True)
class Behaviour:
    """One row of the table of behaviours."""

    claim: str
    """The behaviour that has to hold."""
    source: str
    """The peer's test that asserts it: `vLLM FILE` or `SGLang FILE`."""
    expected: Check | Refused
    path: str = CHAT
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the body beside `BASE`'s. `...` removes one of these."""
    output: str | Sequence[Step] = "Hello world"
    """Text that the model generates, as far as a grammar of the request allows it."""
    ends: FinishReason = FinishReason.STOP
    model: str = "plain"
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    raw: bytes | None = None
    """Raw body to send in place of the fields."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peer(self) -> str:
        return self.source.partition(" ")[0]


@cache
def served(template: str) -> ServedModel:
    reference = copy(tiny.byte_level())
    reference.chat_template = TEMPLATES[template]
    tokenizer = Tokenizer(reference)
    return ServedModel(
        tiny.MODEL, tokenizer, (tiny.END_ID,), len(reference), formats=model_formats(tokenizer, "llama")
    )


@cache
def _application(model: str, settings: tuple[tuple[str, Any], ...]) -> tuple[ApiMiddleware, ScriptedBackend]:
    backend = ScriptedBackend(known_limits=LIMITS)
    return create_app(backend, served(model), CollectorRegistry(), ApiSettings(**dict(settings))), backend


async def send(row: Behaviour) -> tuple[httpx.Response, Answer]:
    """Send the row to an application whose model generates the row's output."""
    app, backend = _application(row.model, tuple(row.settings.items()))
    backend.script = _script(row)
    backend.asked = []
    body = {
        name: value for name, value in {**BASE.get(row.path, {}), **row.fields}.items() if value is not ...
    }
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        headers = {"content-type": "application/json", **row.headers}
        content = json.dumps(body).encode() if row.raw is None else row.raw
        reply = await http.request(row.method, row.path, content=content, headers=headers)
    events, done = _events(reply)
    is_json = reply.headers.get("content-type", "").startswith("application/json")
    content_of_reply = reply.json() if is_json else reply.text
    return reply, Answer(reply.status_code, content_of_reply, events, done, reply.headers, backend.asked)


def _events(reply: httpx.Response) -> tuple[list[Any], bool]:
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        return [], False
    data = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"], "[DONE]" in data


def _script(row: Behaviour) -> Callable[[Request], Sequence[Step]]:
    model, chance = served(row.model), random.Random(0)

    def script(request: Request) -> Sequence[Step]:
        if not isinstance(row.output, str):
            return row.output
        return in_turn(*(_answer(row, row.output, request, model, chance) for _ in range(request.choices)))

    return script


def _answer(
    row: Behaviour, text: str, request: Request, model: ServedModel, chance: random.Random
) -> list[Step]:
    top = request.sampling.top_logprobs
    output = model.tokenizer.encode(text, add_special_tokens=False)
    ends = row.ends
    if request.grammar is not None:
        output = _drawn(request, model, output, chance)
        ends = FinishReason.STOP if output[-1] == tiny.END_ID else FinishReason.LENGTH
    elif ends is FinishReason.STOP:
        output = [*output, tiny.END_ID]
    if len(output) > request.max_tokens:
        output, ends = output[: request.max_tokens], FinishReason.LENGTH
    last = len(output) - 1
    return [batch([id_], ends if place == last else None, top) for place, id_ in enumerate(output)]


def _drawn(request: Request, model: ServedModel, towards: Sequence[int], chance: random.Random) -> list[int]:
    """Draw tokens that the grammar allows, following a text as far as that is allowed."""
    assert request.grammar is not None
    vocabulary = vocabulary_of(model.tokenizer.codec, model.vocabulary, model.eos_token_ids)
    fold = compile_grammar(request.grammar, vocabulary)
    output: list[int] = []
    follows = True
    while len(output) < DRAWN_MAX:
        mask = fold.allowed(request, output)
        allowed = [id_ for id_ in range(model.vocabulary) if mask[id_ // 8] >> id_ % 8 & 1]
        wanted = towards[len(output)] if follows and len(output) < len(towards) else tiny.END_ID
        follows = follows and wanted in allowed
        output.append(wanted if wanted in allowed else chance.choice(allowed))
        if output[-1] == tiny.END_ID:
            break
    return output
