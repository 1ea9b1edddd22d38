"""Tests of error paths: a fault of a translated request names the field of the original body."""

import pytest

from baton.api.errors import ApiError, invalid
from baton.api.requests.field_paths import FieldPaths

TERMS = FieldPaths(
    {
        "messages": "input",
        "messages[1]": "input[2]",
        "messages[1].content": "input[2].output",
        "stop": "stop_sequences",
        "tools[0].function": "tools[0]",
        "tools[0].function.parameters": "tools[0].input_schema",
    }
)


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("messages", "input"),
        ("messages[7].role", "input[7].role"),
        ("messages[1].role", "input[2].role"),
        ("messages[1].content[0].text", "input[2].output[0].text"),
        ("messages[10].content", "input[10].content"),
        ("stop[3]", "stop_sequences[3]"),
        ("stopped", "stopped"),
        ("tools[0].function.name", "tools[0].name"),
        ("tools[0].function.parameters", "tools[0].input_schema"),
        ("tools[1].function.name", "tools[1].function.name"),
        ("temperature", "temperature"),
    ],
)
def test_a_path_is_the_callers_as_far_as_it_has_another(path: str, own: str) -> None:
    assert TERMS.own(path) == own


def test_an_error_names_the_callers_path_wherever_it_names_one() -> None:
    with pytest.raises(ApiError) as raised, TERMS.translating():
        raise invalid(
            "stop[0]", "Give 'stop[0]' or 'tools[0].function.parameters', and no 'Stop it'.", "both"
        )
    error = raised.value
    assert (error.status, error.param, error.code) == (400, "stop_sequences[0]", "both")
    assert str(error) == "Give 'stop_sequences[0]' or 'tools[0].input_schema', and no 'Stop it'."
