"""Tests that a validation error names the field and the fault in terms that the request's sender knows."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
from pydantic import ValidationError

from baton.api.errors import ApiError, invalid
from baton.api.http.request_bodies import parse
from baton.api.requests.schema_fields import fields_of
from baton.api.requests.schemas import (
    ChatRequest,
    CompletionRequest,
    Message,
    Shape,
    StreamOptions,
)
from baton.api.requests.token_requests import DetokenizeRequest, TokenizeRequest
from baton.api.requests.unsupported_fields import HARMLESS, IGNORED, INSTEAD, NOT_SERVED
from baton.api.requests.validation_errors import OWN_TYPES, TYPES, VALUES
from tests.api import tiny

USER: Final = {"role": "user", "content": "hi"}
GOOD: Final[dict[type[Shape], dict[str, Any]]] = {
    ChatRequest: {"model": tiny.MODEL, "messages": [USER]},
    CompletionRequest: {"model": tiny.MODEL, "prompt": "hi"},
    TokenizeRequest: {"prompt": "hi"},
    DetokenizeRequest: {"tokens": [1]},
}
WRONG: Final[tuple[Any, ...]] = (
    True, 0, -1, 1, 5.5, -3.5, 10**30, 2**64, -(2**70), 1e300,
    "", "x", "x" * 5000, "5", "\ud7ff",
    [], [""], [5], ["a", 5], [[]], [None], [{}], ["a"] * 100, list(range(5000)), [[1], [2, "x"]], [[1.5]],
    {}, {"x": 1}, {"": 1}, {"-1": 1}, {"5": "x"}, {"5": 1e300}, {"9" * 12: 1}, {"a.b": 1},
    {"a[0]": None, "b": 1}, {"x": {"y": [1]}}, [{"type": "text"}],
    [{"role": "user"}], [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": [{"type": "image"}]}],
    [USER, {"role": "user", "content": {"a": 1}}], [USER | {"name": 5}], [USER | {"nmae": "x"}], [USER, 5],
)  # fmt: skip
"""Values of every JSON type, and some that are nearly valid."""
LIBRARYS: Final = re.compile(
    r"Input should|valid (string|integer|list|dict)|dictionary|\b(str|int|float|bool)\b|unable to parse"
    r"|pydantic|Value error|Extra inputs|Field required|\[key\]|function-|instance of|[{}]|\.\.",
)


def bodies() -> Iterator[tuple[type[Shape], dict[str, Any]]]:
    for shape, good in GOOD.items():
        for name in (*shape.model_fields, "", "temprature", "a.b", "x" * 500):
            for value in WRONG:
                yield shape, good | {name: value}
        for value in WRONG:
            yield (
                shape,
                {name: each for name, each in good.items() if name != next(iter(good))} | {"user": value},
            )
    for value in WRONG:
        for name in (*Message.model_fields, "tool_call_id", "cotnent"):
            yield ChatRequest, GOOD[ChatRequest] | {"messages": [USER, USER | {name: value}]}
        for name in (*StreamOptions.model_fields, "x"):
            yield ChatRequest, GOOD[ChatRequest] | {"stream": True, "stream_options": {name: value}}


def is_written_in(body: Any, param: str) -> bool:
    """Whether a path leads somewhere in a body, or to a name that is missing where it leads."""
    return param in {*paths(body, "")}


def paths(value: Any, at: str) -> Iterator[str]:
    """Yield the path of each value in a body, and of each field that one of its objects lacks."""
    yield at
    if isinstance(value, dict):
        for name in {*value, *FIELDS}:
            here = f"{at}.{name}" if at else str(name)
            yield here if len(here) <= 128 else here[:128] + "…"
            yield from paths(value.get(name), here)
    if isinstance(value, list):
        for place, each in enumerate(value):
            yield from paths(each, f"{at}[{place}]")


FIELDS: Final = {name for shape in GOOD for names in fields_of(shape).values() for name in names}


def refusal(shape: type[Shape], body: dict[str, Any]) -> ApiError | None:
    try:
        parse(json.dumps(body).encode(), shape)
    except ApiError as error:
        return error
    return None


def test_every_wrong_value_of_every_field_is_told_in_its_senders_words() -> None:
    told = 0
    for shape, body in bodies():
        if (error := refusal(shape, body)) is None:
            continue
        told += 1
        message, shown = str(error), str(body)[:200]
        assert error.status == 400, (shown, message)
        assert error.param is None or is_written_in(body, error.param), (shown, error.param)
        assert not LIBRARYS.search(message.replace(error.param or "\0", "")), (shown, message)
        assert message.endswith((".", "?")), message
    assert told > 1500


def test_nothing_of_the_librarys_words_is_passed_on() -> None:
    """Each kind of fault that the schemas can find has words here, or is one of our own."""
    own = {
        "content_part",
        "fields",
        "logit_bias",
        "messages",
        "prompt_empty",
        "prompts",
        "role",
        "tool",
        "tool_choice",
        "arguments",
        "tools",
        "schema",
        "format_type",
        "unsupported",
        "words",
        "name",
        "prompt_length",
    }
    kinds = {"missing", "extra_forbidden", *TYPES, *VALUES, *OWN_TYPES, *own}
    found = set()
    for shape, body in bodies():
        try:
            shape.model_validate(body)
        except ValidationError as error:
            found |= {each["type"] for each in error.errors(include_url=False, include_input=False)}
    assert found <= kinds


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"seed": 2**63}, "seed", "it has to be below 9223372036854775808."),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "the key has to be a token id"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"Max_Tokens": 1}, "Max_Tokens", "Unrecognized"),
        ({"messages": [USER | {"contents": "x"}]}, "messages[0].contents", "did you mean 'content'?"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages", "'include_usage'?"),
        ({"verbosity": 1}, "verbosity", "'verbosity' is not supported."),
        ({"enable_thinking": False}, "enable_thinking", "is not supported"),
        ({"max_new_tokens": 5}, "max_new_tokens", "is not supported; use 'max_tokens'."),
        ({"messages": [USER | {"reasoning_details": "x"}]}, "messages[0].reasoning_details", "is not"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]},
         "messages[0].tool_calls[0].function", "Missing required"),
        ({"messages": [USER | {"function_call": {"name": "x"}}]},
         "messages[0].function_call", "is not supported."),
    ],
)  # fmt: skip
def test_what_is_not_served_is_told_from_what_is_misspelt(
    fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(ApiError) as told:
        parse(json.dumps(GOOD[ChatRequest] | fields).encode(), ChatRequest)
    assert told.value.param == param
    assert says in str(told.value)


def test_what_is_served_is_not_said_not_to_be() -> None:
    served = {shape: set(names) for shape, names in fields_of(ChatRequest).items()}
    served[""] |= {*CompletionRequest.model_fields, *IGNORED, *HARMLESS}
    for shape, names in NOT_SERVED.items():
        assert not names & served[shape] - set(TokenizeRequest.model_fields)
    assert set(INSTEAD) <= NOT_SERVED[""]
    assert set(INSTEAD.values()) <= served[""]


@pytest.mark.parametrize(
    ("text", "told"), [("a..", "a."), ("a.", "a."), ("a", "a"), ("a...", "a."), ("a?", "a?")]
)
def test_a_message_ends_with_one_full_stop_at_most(text: str, told: str) -> None:
    assert str(invalid(None, text)) == told
