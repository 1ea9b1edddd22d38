"""Every answer to a random schema validates by an independent validator."""

import json
import random
from collections.abc import Callable
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator

from baton.api.tools.constraints.constraints import WHITESPACE
from baton.rooms.request import FinishReason
from tests.grammars.answers import drawn, fold_of, request, schema, text_of

SCHEMAS: Final = 120
"""Seeds of the schemas. Try thousands by hand, with another range."""
DEEPEST: Final = 3
TOKENS: Final = 1_500
NAMES: Final = ("a", "name", "größe", 'quo"te', "x y")

Make = Callable[[random.Random, int], dict[str, Any]]


def _text(draw: random.Random, _: int) -> dict[str, Any]:
    least = draw.randrange(3)
    lengths = {"minLength": least, "maxLength": least + draw.randrange(6)}
    patterns = ["^[a-c]{1,4}$", "^(x|yy){1,9}$", r"^\d{2}-\d{2}$"]
    pattern, form = draw.choice(patterns), draw.choice(["date", "time", "ipv4", "uuid"])
    return {"type": "string", **draw.choice([lengths, {"pattern": pattern}, {"format": form}])}


def _number(draw: random.Random, _: int) -> dict[str, Any]:
    least = draw.randrange(-50, 50)
    bounds = {"minimum": least, "maximum": least + draw.randrange(1, 900)}
    return {"type": draw.choice(["integer", "number"]), **bounds}


def _one_of_few(draw: random.Random, _: int) -> dict[str, Any]:
    values: list[Any] = ["red", 'a "b"', 7, -1.5, True, None, [1, "x"], {"k": 1}]
    return {"enum": draw.sample(values, draw.randrange(1, 4))}


def _plain(draw: random.Random, _: int) -> dict[str, Any]:
    return {"type": draw.choice(["boolean", "null"])}


def _constant(draw: random.Random, _: int) -> dict[str, Any]:
    return {"const": draw.choice(["fixed", 12, False, None])}


def _list(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randrange(3)
    most = {"minItems": least, "maxItems": least + draw.randrange(3)}
    return {"type": "array", "items": _any(draw, depth - 1), **most}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(draw, depth - 1) for name in names},
        "required": draw.sample(names, draw.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _any_of(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(draw, depth - 1) for _ in range(draw.randrange(1, 4))]}


LEAVES: Final[tuple[Make, ...]] = (_text, _number, _one_of_few, _plain, _constant)
BRANCHES: Final[tuple[Make, ...]] = (_list, _object, _object, _any_of)


def _any(draw: random.Random, depth: int) -> dict[str, Any]:
    return draw.choice(LEAVES if depth == 0 else LEAVES + BRANCHES)(draw, depth)


def random_schema(seed: int) -> dict[str, Any]:
    """Return an object with a reference to its own definition."""
    draw = random.Random(seed)
    made = _object(draw, DEEPEST)
    made["$defs"] = {"shared": _any(draw, 1)}
    made["properties"]["again"] = {"$ref": "#/$defs/shared"}
    made["required"].append("again")
    return made


@pytest.mark.parametrize("seed", range(SCHEMAS))
def test_an_answer_to_a_random_schema_validates(seed: int) -> None:
    """Draw each token among all allowed ones, as the worst model would."""
    wanted = random_schema(seed)
    asked = request()
    root = fold_of(schema({**wanted, "x-guidance": {"whitespace_pattern": WHITESPACE}}))
    output = drawn(root.anew(), asked, seed, TOKENS)
    assert asked.finish_reason(output) is FinishReason.STOP
    Draft202012Validator(wanted, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(
        json.loads(text_of(output))
    )
