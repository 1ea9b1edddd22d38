"""Answers that are held to a form, tools and their calls, and thoughts."""

import json
import re
from functools import partial
from typing import Any, Final

from tests.api.behaviours.asking import CHAT, COMPLETIONS, USER, Answer, Behaviour, Check, Refused, behaviours
from tests.api.behaviours.texts import SC, SG, SP, SX, VC, streams

chat = partial(Behaviour, path=CHAT)
text = partial(Behaviour, path=COMPLETIONS)
VJ = "vLLM chat_completion/test_chat_completion.py"
VT = "vLLM tool_use/test_chat_completion_request_validations.py"
VR = "vLLM tool_use/test_tool_choice_required.py"
VU = "vLLM tool_use/test_tool_calls.py"
VF = "vLLM chat_completion/test_completion_with_function_calling.py"
SF = "SGLang function_call/test_openai_function_calling.py"
ST = "SGLang function_call/test_tool_choice.py"
SE = "SGLang features/test_openai_server_ebnf.py"
SJ = "SGLang features/test_json_mode.py"
FAULT: Final = "a fault of the request"
PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
ANN: Final = '{"name": "Ann", "age": 7}'
IP: Final = r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
GBNF: Final = 'root ::= "Hello" | "Hi"'
LARK: Final = 'start: "Hello" | "Hi"'
LANGUAGES: Final = ["Rust", "Ada", "Zig"]
BROKEN: Final = {**PERSON, "properties": {**PERSON["properties"], "foo": "bar"}}


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, **more}}


def is_person(answer: Answer) -> bool:
    told = json.loads(answer.text)
    return set(told) == {"name", "age"} and type(told["age"]) is int


def is_object(answer: Answer) -> bool:
    return isinstance(json.loads(answer.text), dict)


FORMS: Final[dict[str, tuple[str, dict[str, Any], Any, str]]] = {
    "response_format json_schema": (VC, {"response_format": named(PERSON)}, is_person, ANN),
    "response_format json_schema, strict": (
        SJ,
        {"response_format": named(PERSON, strict=True)},
        is_person,
        ANN,
    ),
    "response_format json_object": (VC, {"response_format": {"type": "json_object"}}, is_object, '{"a": 1}'),
    "structured_outputs json": (VC, {"structured_outputs": {"json": PERSON}}, is_person, ANN),
    "structured_outputs json in a text": (
        VC,
        {"structured_outputs": {"json": json.dumps(PERSON)}},
        is_person,
        ANN,
    ),
    "structured_outputs json_object": (VC, {"structured_outputs": {"json_object": True}}, is_object, "{}"),
    "structured_outputs regex": (
        VC,
        {"structured_outputs": {"regex": IP}},
        lambda a: re.fullmatch(IP, a.text),
        "no address",
    ),
    "structured_outputs choice": (
        VC,
        {"structured_outputs": {"choice": LANGUAGES}},
        lambda a: a.text in LANGUAGES,
        "C++",
    ),
    "structured_outputs grammar": (
        VJ,
        {"structured_outputs": {"grammar": GBNF}},
        lambda a: a.text == "Hi",
        "Hi",
    ),
    "structured_outputs grammar, Lark's": (
        VJ,
        {"structured_outputs": {"grammar": LARK}},
        lambda a: a.text == "Hi",
        "Hi",
    ),
    "guided_json": (VC, {"guided_json": PERSON}, is_person, ANN),
    "guided_regex": (VC, {"guided_regex": IP}, lambda a: re.fullmatch(IP, a.text), "no address"),
    "guided_choice": (VC, {"guided_choice": LANGUAGES}, lambda a: a.text in LANGUAGES, "C++"),
    "guided_grammar": (VC, {"guided_grammar": GBNF}, lambda a: a.text == "Hi", "Hi"),
    "json_schema": (SJ, {"json_schema": json.dumps(PERSON)}, is_person, ANN),
    "regex": (
        SG,
        {"regex": r"\{\n   \"name\": \"[\w]+\",\n   \"population\": [\d]+\n\}"},
        lambda a: type(json.loads(a.text)["population"]) is int,
        '{\n   "name": "P",\n   "population": 1\n}',
    ),
    "ebnf": (SE, {"ebnf": GBNF}, lambda a: a.text in ("Hello", "Hi"), "Good day"),
}
NO_FORM: Final[dict[str, tuple[str, dict[str, Any], str]]] = {
    "an invalid schema": (VJ, {"structured_outputs": {"json": BROKEN}}, "structured_outputs.json"),
    "an invalid regex": (VJ, {"structured_outputs": {"regex": "[.*"}}, "structured_outputs.regex"),
    "an invalid grammar": (
        VJ,
        {"structured_outputs": {"grammar": "root ::= nothing here"}},
        "structured_outputs.grammar",
    ),
    "an empty grammar": (VJ, {"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
    "a regex that is no text": (
        VC,
        {"structured_outputs": {"regex": {"1": "Python"}}},
        "structured_outputs.regex",
    ),
    "a number instead of structured_outputs": (VT, {"structured_outputs": 3}, "structured_outputs"),
    "two forms in one": (
        VT,
        {"structured_outputs": {"json": {"type": "object"}, "regex": ".*"}},
        "structured_outputs.regex",
    ),
    "no form in structured_outputs": (VT, {"structured_outputs": {}}, "structured_outputs"),
    "json_schema without a schema": (
        "vLLM chat_completion/test_chat_error.py",
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
    ),
    "an unknown type of response_format": (SJ, {"response_format": {"type": "xml"}}, "response_format.type"),
    "an invalid EBNF": (SE, {"ebnf": "root := ("}, "ebnf"),
    "an invalid SGLang regex": (SE, {"regex": "("}, "regex"),
    "a form by two fields": (SE, {"regex": "a", "ebnf": GBNF}, "ebnf"),
}
STRUCTURED: Final = behaviours(
    *(
        row
        for name, (source, fields, check, said) in FORMS.items()
        for row in streams(chat(f"{name} holds the answer", source, check, fields=fields, said=said))
    ),
    *(
        text(f"{name} holds a completion", source, check, fields={**fields, "max_tokens": 200}, said=said)
        for name, (source, fields, check, said) in FORMS.items()
    ),
    *(
        chat(f"{name} is refused", source, Refused(param, why=FAULT), fields=fields)
        for name, (source, fields, param) in NO_FORM.items()
    ),
    *(
        text(f"{name} of a completion is refused", source, Refused(param, why=FAULT), fields=fields)
        for name, (source, fields, param) in [*NO_FORM.items()][:4]
    ),
    chat(
        "response_format text holds nothing",
        VC,
        lambda a: a.text == "Hello world",
        fields={"response_format": {"type": "text"}},
    ),
    chat(
        "log-probabilities of what is held are above −9999 or it",
        VC,
        lambda a: all(
            t["logprob"] >= -9999 for c in a.choice["logprobs"]["content"] for t in c["top_logprobs"]
        ),
        fields={"guided_choice": LANGUAGES, "logprobs": True, "top_logprobs": 5},
        said="Ada",
    ),
    chat(
        "a form goes with tools that may be called",
        VT,
        is_person,
        fields={
            "structured_outputs": {"json": PERSON},
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        },
        said=ANN,
    ),
    chat(
        "a form and a named function are refused",
        VT,
        Refused("structured_outputs.json", why=FAULT),
        fields={
            "structured_outputs": {"json": PERSON},
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    ),
    chat(
        "a structural_tag is refused by name",
        SC,
        Refused("response_format.type", why="schemas, regular expressions and grammars hold an answer"),
        fields={
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "end": "</a>"}],
                "triggers": ["<a>"],
            }
        },
    ),
    chat(
        "SGLang's structural_tag is refused by name",
        "SGLang features/test_structural_tag.py",
        Refused("structural_tag", why="as above"),
        fields={"structural_tag": "{}"},
    ),
    *streams(
        chat(
            "a schema beside its type holds the answer",
            SP,
            is_person,
            said=ANN,
            fields={"response_format": {"type": "json_schema", "schema": PERSON}},
        ),
    ),
    chat(
        "a schema beside json_object holds the answer",
        SP,
        is_person,
        said=ANN,
        fields={"response_format": {"type": "json_object", "schema": PERSON}},
    ),
    chat(
        "a schema beside its type and another in json_schema are refused",
        SP,
        Refused("response_format.schema", why=FAULT),
        fields={"response_format": {**named(PERSON), "schema": {"type": "object"}}},
    ),
    chat(
        "the same schema beside its type and in json_schema holds the answer",
        SP,
        is_person,
        said=ANN,
        fields={"response_format": {**named(PERSON), "schema": PERSON}},
    ),
    *streams(
        chat(
            "a record of zod holds the answer",
            VJ,
            lambda a: all(type(each) is int for each in json.loads(a.text).values()),
            said='{"a": 1}',
            fields={
                "structured_outputs": {
                    "json": {
                        "type": "object",
                        "propertyNames": {"type": "string"},
                        "additionalProperties": {"type": "integer"},
                    }
                }
            },
        ),
    ),
)
CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "maximum": 7},
    },
    "required": ["city", "days"],
}


def tool(name: str = "weather", **said: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "It.", "parameters": CITY, **said}}


EVERY_WORD: Final = {
    "json": PERSON,
    "regex": None,
    "choice": None,
    "grammar": None,
    "json_object": None,
    "disable_fallback": False,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
}
TOOLS: Final = {"tools": [tool(), tool("pokemon")]}
CALL: Final = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
WEATHER: Final = ("weather", {"city": "Rome", "days": 3})
BY_NAME: Final = {"type": "function", "function": {"name": "weather"}}
CALLED: Final = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    ],
}
RESULT: Final = {"role": "tool", "tool_call_id": "c1", "content": "It is warm."}


def forced(answer: Answer) -> bool:
    (name, arguments), *_ = answer.calls
    return (
        name in ("weather", "pokemon") and arguments["city"] in ("Paris", "Rome") and arguments["days"] <= 7
    )


OPTIONS: Final = {
    "title": "Options",
    "type": "object",
    "additionalProperties": False,
    "properties": {"forecast": {"type": "boolean", "default": False, "title": "Forecast"}},
}
ODD: Final = {
    "type": "object",
    "strict": True,
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"], "default": "Rome"},
        "days": {"type": "integer", "maximum": 7},
        "options": {"$ref": "#/$defs/Options", "description": "Optional."},
    },
    "required": ["city", "days"],
    "$defs": {"Options": OPTIONS},
}
"""Words that say nothing, as tools of real clients have them."""


CALLS: Final = behaviours(
    *streams(
        chat(
            "parameters with a default, a $ref, a $defs and words that say nothing are held to",
            VF,
            forced,
            fields={"tools": [tool(parameters=ODD)], "tool_choice": "required"},
            said="I will not.",
        ),
        chat(
            "a named function by such parameters is called",
            VF,
            forced,
            said="I will not.",
            fields={"tools": [tool(parameters=ODD)], "tool_choice": BY_NAME},
        ),
        chat(
            "a forced call that max_tokens cuts off at once is no call, and ends by length",
            VF,
            lambda a: (a.message.get("tool_calls") or [], a.choice["finish_reason"]) == ([], "length"),
            fields={**TOOLS, "tool_choice": "required", "max_completion_tokens": 1},
        ),
        chat(
            "a named call that max_tokens cuts off at once is no call, and ends by length",
            VF,
            lambda a: (a.message.get("tool_calls") or [], a.choice["finish_reason"]) == ([], "length"),
            fields={**TOOLS, "tool_choice": BY_NAME, "max_completion_tokens": 1},
        ),
    ),
    chat(
        "an object that is empty is no choice",
        VF,
        Refused("tool_choice", why=FAULT),
        fields={**TOOLS, "tool_choice": {}},
    ),
    chat(
        "a named function without tools is refused",
        VF,
        Refused("tool_choice", why=FAULT),
        fields={"tool_choice": BY_NAME},
    ),
    *(
        chat(
            f"arguments {arguments!r} of a call of history are none",
            VF,
            lambda a: "warm" in a.prompt,
            fields={
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {
                                "id": "c1",
                                "type": "function",
                                "function": {"name": "now", "arguments": arguments},
                            }
                        ],
                    },
                    RESULT,
                ]
            },
        )
        for arguments in ("{}", "")
    ),
    chat(
        "structured_outputs with every word that vLLM knows hold the answer",
        VT,
        is_person,
        said=ANN,
        fields={"structured_outputs": EVERY_WORD},
    ),
    chat(
        "strict beside the function is the function's",
        VR,
        forced,
        said="I will not.",
        fields={"tools": [{**tool(), "strict": True}], "tool_choice": "required"},
    ),
    chat(
        "strict beside the function holds a call that it may make",
        VR,
        forced,
        said='<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"',
        fields={"tools": [{**tool(), "strict": True}]},
    ),
    *streams(
        chat(
            "a call that the model writes comes as one",
            VU,
            lambda a: a.calls == [WEATHER],
            fields=TOOLS,
            said=CALL,
        ),
        chat(
            "its finish_reason is tool_calls",
            VU,
            lambda a: a.choice["finish_reason"] == "tool_calls",
            fields=TOOLS,
            said=CALL,
        ),
        chat("its content is null or empty", VU, lambda a: not a.text, fields=TOOLS, said=CALL),
        chat(
            "it has an id and the type function",
            VU,
            lambda a: [(c["id"] != "", c["type"]) for c in a.message["tool_calls"]] == [(True, "function")],
            fields=TOOLS,
            said=CALL,
        ),
        chat(
            "two calls come as two",
            "vLLM tool_use/test_parallel_tool_calls.py",
            lambda a: a.calls == [WEATHER] * 2,
            fields=TOOLS,
            said=f"{CALL}\n{CALL}",
        ),
        chat(
            "parallel_tool_calls false passes on one",
            "vLLM tool_use/test_parallel_tool_calls.py",
            lambda a: len(a.calls) == 1,
            fields={**TOOLS, "parallel_tool_calls": False},
            said=f"{CALL}\n{CALL}",
        ),
        chat(
            "text before a call is content",
            VU,
            lambda a: (a.text.strip(), len(a.calls)) == ("Hello.", 1),
            fields=TOOLS,
            said=f"Hello. {CALL}",
        ),
        chat(
            "an answer without a call is content",
            "vLLM tool_use/test_chat_completions.py",
            lambda a: (a.text, a.choice["finish_reason"]) == ("Hello world", "stop"),
            fields=TOOLS,
        ),
        chat(
            "tool_choice auto may call",
            ST,
            lambda a: a.calls == [WEATHER],
            said=CALL,
            fields={**TOOLS, "tool_choice": "auto"},
        ),
        chat(
            "tool_choice none calls nothing",
            VF,
            lambda a: not a.message.get("tool_calls") and a.text,
            said=CALL,
            fields={**TOOLS, "tool_choice": "none"},
        ),
        chat(
            "tool_choice required calls one of them",
            ST,
            forced,
            fields={**TOOLS, "tool_choice": "required"},
            said="I will not.",
        ),
        chat(
            "a named function is called",
            ST,
            lambda a: {name for name, _ in a.calls} == {"weather"},
            fields={**TOOLS, "tool_choice": BY_NAME},
            said="I will not.",
        ),
        chat(
            "strict tools are called by their schema",
            SF,
            forced,
            fields={"tools": [tool(strict=True)], "tool_choice": "required"},
            said="I will not.",
        ),
        chat(
            "a call that is cut off is no call",
            VU,
            lambda a: not a.message.get("tool_calls") and a.text,
            fields=TOOLS,
            said=CALL[:40],
        ),
        chat(
            "a call that is no JSON is text",
            VF,
            lambda a: not a.message.get("tool_calls") and a.text,
            fields=TOOLS,
            said='<tool_call>\n{"name": weather\n</tool_call>',
        ),
        chat(
            "a call whose texts hold braces is read",
            VR,
            lambda a: a.calls == [("weather", {"city": 'a " } b'})],
            fields=TOOLS,
            said='<tool_call>\n{"name": "weather", "arguments": {"city": "a \\" } b"}}\n</tool_call>',
        ),
        chat(
            "required with a tool without parameters gives no arguments",
            VR,
            lambda a: a.calls[0] == ("f", {}),
            said="x",
            fields={"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        ),
        chat(
            "required with empty parameters gives no arguments",
            VR,
            lambda a: a.calls[0] == ("f", {}),
            said="x",
            fields={
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "tool_choice": "required",
            },
        ),
        chat(
            "required gives no argument that nobody named",
            VR,
            lambda a: set(a.calls[0][1]) == {"city", "days"},
            said='<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3, "extra',
            fields={**TOOLS, "tool_choice": "required"},
        ),
        chat(
            "required gives every argument that has to be there",
            VR,
            lambda a: set(a.calls[0][1]) == {"city", "days"},
            said='<tool_call>\n{"name": "weather", "arguments": {}}',
            fields={**TOOLS, "tool_choice": "required"},
        ),
        chat(
            "required gives the names of tools alone",
            VR,
            lambda a: a.calls[0][0] in ("weather", "pokemon"),
            said='<tool_call>\n{"name": "get_weather"',
            fields={**TOOLS, "tool_choice": "required"},
        ),
        chat(
            "a result goes back to the model",
            "vLLM tool_use/test_tool_calls.py",
            lambda a: "It is warm." in a.prompt and "Rome" in a.prompt,
            fields={**TOOLS, "messages": [USER, CALLED, RESULT]},
        ),
    ),
    chat(
        "arguments come in a stream as deltas that join to JSON",
        SF,
        lambda a: (
            json.loads(
                "".join(
                    c["function"].get("arguments") or ""
                    for e in a.events
                    for x in e["choices"]
                    for c in x["delta"].get("tool_calls") or ()
                )
            )
            == WEATHER[1]
        ),
        fields={**TOOLS, "stream": True},
        said=CALL,
    ),
    chat(
        "the name comes in a stream once",
        SF,
        lambda a: (
            [
                c["function"]["name"]
                for e in a.events
                for x in e["choices"]
                for c in x["delta"].get("tool_calls") or ()
                if c["function"].get("name")
            ]
            == ["weather"]
        ),
        fields={**TOOLS, "stream": True},
        said=CALL,
    ),
    chat(
        "the second call of a stream has the index 1",
        "vLLM tool_use/test_parallel_tool_calls.py",
        lambda a: (
            {c["index"] for e in a.events for x in e["choices"] for c in x["delta"].get("tool_calls") or ()}
            == {0, 1}
        ),
        fields={**TOOLS, "stream": True},
        said=f"{CALL}\n{CALL}",
    ),
    chat(
        "the last event of a stream says tool_calls",
        SF,
        lambda a: a.events[-1]["choices"][0]["finish_reason"] == "tool_calls",
        fields={**TOOLS, "stream": True},
        said=CALL,
    ),
    *(
        chat(
            f"tool_choice {choice} without tools is refused",
            VT,
            Refused("tool_choice", why=FAULT),
            fields={"tool_choice": choice},
        )
        for choice in ("required",)
    ),
    chat(
        "tool_choice none without tools is taken",
        SP,
        lambda a: a.status == 200,
        fields={"tool_choice": "none"},
    ),
    chat("tools null counts as none", VT, lambda a: a.status == 200, fields={"tools": None}),
    chat(
        "tool_choice null counts as not given",
        "vLLM chat_completion/test_tool_choice_null.py",
        lambda a: a.calls == [WEATHER],
        fields={**TOOLS, "tool_choice": None},
        said=CALL,
    ),
    chat(
        "a tool_choice that is a number is refused",
        SP,
        Refused("tool_choice", why=FAULT),
        fields={**TOOLS, "tool_choice": 123},
    ),
    chat(
        "a function that is not there is refused",
        VF,
        Refused("tool_choice", why=FAULT),
        fields={**TOOLS, "tool_choice": {"type": "function", "function": {"name": "nothing"}}},
    ),
    chat(
        "an object that names no function is refused",
        VF,
        Refused("tool_choice", why=FAULT),
        fields={**TOOLS, "tool_choice": {"type": "function"}},
    ),
    chat(
        "a tool without a function is refused",
        VF,
        Refused("tools[0].function", why=FAULT),
        fields={"tools": [{"type": "function"}]},
    ),
    chat(
        "parameters that are no schema are refused",
        SX,
        Refused("tools[0].function.parameters", why=FAULT),
        fields={"tools": [tool(parameters={"type": "nothing"})], "tool_choice": "required"},
    ),
    chat(
        "a tool of another type is refused by name",
        SG,
        Refused("tools[0].type", why="functions are served"),
        fields={"tools": [{"type": "web_search"}]},
    ),
    chat(
        "allowed_tools narrows them",
        VF,
        lambda a: a.calls[0][0] == "pokemon",
        said="x",
        fields={
            **TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "pokemon"}}],
                },
            },
        },
    ),
    chat(
        "arguments in history may be an object",
        "vLLM chat_completion/test_serving_chat.py",
        lambda a: "Rome" in a.prompt,
        fields={
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": {"city": "Rome"}},
                        }
                    ],
                },
                RESULT,
            ]
        },
    ),
    chat(
        "a result may be text parts",
        "vLLM chat_completion/test_serving_chat.py",
        lambda a: "warm" in a.prompt,
        fields={"messages": [USER, CALLED, {**RESULT, "content": [{"type": "text", "text": "warm"}]}]},
    ),
    chat(
        "OpenAI's old functions are refused by name",
        VF,
        Refused("functions", why="tools are their name now"),
        fields={"functions": [{"name": "f"}]},
    ),
)
THOUGHT: Final = "<think>\nHm, they ask.\n</think>\n\nHello"
VN, SR = "vLLM chat_completion/test_separate_reasoning.py", "SGLang features/test_reasoning_content.py"
VI, SU = "vLLM chat_completion/test_include_reasoning.py", "SGLang features/test_reasoning_usage_tokens.py"
SK = "SGLang features/test_enable_thinking.py"
thinks = partial(Behaviour, path=CHAT, model="thinks", said=THOUGHT)


def reaches_the_prompt(text: str) -> Check:
    return lambda answer: text in answer.prompt


REASONING: Final = behaviours(
    *streams(
        thinks(
            "thoughts come as reasoning_content",
            SR,
            lambda a: a.message["reasoning_content"] == "Hm, they ask.",
        ),
        thinks("thoughts come as reasoning, too", VN, lambda a: a.message["reasoning"] == "Hm, they ask."),
        thinks("thoughts are no content", SR, lambda a: a.text == "Hello"),
        thinks(
            "stream_reasoning false changes nothing of what they are",
            SR,
            lambda a: (a.message["reasoning_content"], a.text) == ("Hm, they ask.", "Hello"),
            fields={"stream_reasoning": False},
        ),
        thinks(
            "where nothing is thought, reasoning_content is there and null",
            SR,
            lambda a: a.message["reasoning_content"] is None and a.text == "Hello",
            said="Hello",
        ),
        thinks(
            "separate_reasoning false leaves them in the content",
            SR,
            lambda a: a.text == THOUGHT,
            fields={"separate_reasoning": False},
        ),
        thinks(
            "include_reasoning false leaves them out",
            VI,
            lambda a: (a.text, a.message.get("reasoning")) == ("Hello", None),
            fields={"include_reasoning": False},
        ),
        thinks(
            "an answer without thoughts has none",
            "SGLang features/test_reasoning_off_by_default.py",
            lambda a: a.text == "Hello" and not a.message.get("reasoning_content"),
            said="Hello",
        ),
        thinks(
            "thoughts without an end are thoughts",
            SR,
            lambda a: not a.text and a.message["reasoning"] == "Hm.",
            said="<think>\nHm.",
        ),
        thinks(
            "a form begins behind the thoughts",
            "SGLang features/test_reasoning_json_schema_n.py",
            lambda a: is_person(a) and a.message["reasoning"],
            fields={"response_format": named(PERSON)},
            said=f"<think>\nHm.\n</think>\n\n{ANN}",
        ),
        thinks(
            "a call comes behind the thoughts",
            "vLLM chat_completion/test_chat_with_tool_reasoning.py",
            lambda a: a.calls == [WEATHER] and a.message["reasoning"],
            fields=TOOLS,
            said=f"<think>\nHm.\n</think>\n\n{CALL}",
        ),
    ),
    thinks(
        "enable_thinking false closes them in the prompt",
        SK,
        lambda a: a.prompt.endswith("</think>\n\n"),
        fields={"chat_template_kwargs": {"enable_thinking": False}},
        said="Hello",
    ),
    thinks(
        "enable_thinking true leaves them open",
        SK,
        lambda a: a.message["reasoning_content"],
        fields={"chat_template_kwargs": {"enable_thinking": True}},
    ),
    thinks(
        "reasoning tokens are counted",
        SU,
        lambda a: a.usage["completion_tokens_details"]["reasoning_tokens"] == a.usage["reasoning_tokens"] > 0,
    ),
    thinks(
        "reasoning tokens are counted in a stream",
        SU,
        lambda a: a.usage["completion_tokens_details"]["reasoning_tokens"] == a.usage["reasoning_tokens"] > 0,
        fields={"stream": True, "stream_options": {"include_usage": True}},
    ),
    thinks(
        "none are counted where there are none",
        SU,
        lambda a: not a.usage.get("completion_tokens_details", {}).get("reasoning_tokens"),
        said="Hello",
    ),
    *(
        thinks(
            f"reasoning_effort {effort} reaches the template",
            "vLLM chat_completion/test_reasoning_effort.py",
            reaches_the_prompt(effort),
            fields={"reasoning_effort": effort},
        )
        for effort in ("low", "medium", "high")
    ),
    thinks(
        "reasoning_effort none closes them in the prompt",
        "vLLM chat_completion/test_reasoning_effort.py",
        lambda a: a.prompt.endswith("</think>\n\n"),
        fields={"reasoning_effort": "none"},
        said="Hello",
    ),
    thinks(
        "an unknown reasoning_effort is refused",
        "vLLM chat_completion/test_reasoning_effort.py",
        Refused("reasoning_effort", why=FAULT),
        fields={"reasoning_effort": "enormous"},
    ),
    *(
        thinks(
            f"{name} of an earlier turn reaches the template",
            VT,
            lambda a: "Two." in a.prompt,
            fields={"messages": [USER, {"role": "assistant", "content": "4", name: "Two."}, USER]},
        )
        for name in ("reasoning_content", "reasoning")
    ),
    thinks(
        "of reasoning and reasoning_content of an earlier turn, reasoning is the one",
        VT,
        reaches_the_prompt("Two."),
        fields={
            "messages": [
                USER,
                {"role": "assistant", "content": "4", "reasoning": "Two.", "reasoning_content": "Three."},
                USER,
            ]
        },
    ),
    thinks(
        "a turn without thoughts stays as it is",
        VT,
        lambda a: "<think>" not in a.prompt,
        fields={"messages": [USER, {"role": "assistant", "content": "4"}, USER]},
    ),
    thinks(
        "the reasoning object has an effort and turns thoughts on",
        SP,
        reaches_the_prompt("high<|start|>"),
        fields={"reasoning": {"enabled": True, "reasoning_effort": "high"}},
    ),
    thinks(
        "a budget of thoughts is refused by name",
        "vLLM chat_completion/test_thinking_token_budget.py",
        Refused("thinking_token_budget", why="thoughts are free"),
        fields={"thinking_token_budget": 8},
    ),
)
