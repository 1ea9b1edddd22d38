"""OpenAPI document at `/openapi.json`: request bodies, responses and errors of each route.

A route describes itself in its decorator: `**describe(Body, Answer, statuses=GENERATING)`. Bodies are the
schemas that validate them. Responses are the types that renderings return, which mypy checks. This module
adds what all routes have in common.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from baton.api.errors import ErrorAnswer
from baton.api.requests.schemas import Shape

REFERENCE: Final = "#/components/schemas/{model}"
REFERRED: Final = re.compile(r"#/components/schemas/(\w+)")
STATUSES: Final[Mapping[int, str]] = {
    400: "A field is wrong, missing, unknown or not served, or what is asked for does not fit.",
    401: "There are API keys, and none of them was sent.",
    404: "Another model than the one that is served, or nothing of that name.",
    408: "The body did not arrive in time.",
    413: "The body is larger than `--max-body-bytes`.",
    415: "The body is not JSON by its `Content-Type`, or is compressed.",
    421: "It is for another host than this one.",
    429: "Too much is asked for now; `Retry-After` says when to ask again.",
    500: "A mistake of Baton's, which its log has, or of the model's chat template.",
    503: "A side has no worker, or the request failed on all the pairs that it was given.",
}
ANY: Final = (400, 401, 421, 429, 500)
"""Error statuses that every route may return, for its OpenAPI description."""
NAMING: Final = (404,)
"""Error statuses of a route whose path names an object, such as a model, for its OpenAPI description."""
TAKING: Final = (404, 408, 413, 415)
"""Error statuses of a route that takes a request body, for its OpenAPI description."""
GENERATING: Final = (*TAKING, 503)
KEY: Final = "key"
BOUNDS: Final = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}

LAST_EVENT_ID: Final[Mapping[str, Any]] = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "Id of the last event of a stream whose connection broke. The stream goes on behind it.",
}
"""Header parameter of the routes whose streams can be resumed, for their OpenAPI description."""

AnswerType = Any
"""Type of a response body: a `TypedDict` class, or a named union of such classes."""

_shapes: dict[str, AnswerType] = {}
"""Types of request and response bodies in the OpenAPI document, by the name under which routes
refer to them."""


def describe(
    takes: type[Shape] | None = None,
    answers: AnswerType | None = None,
    *,
    events: AnswerType | None = None,
    statuses: Sequence[int] = (),
    errors: AnswerType = ErrorAnswer,
) -> dict[str, Any]:
    """Return keyword arguments for a route's decorator, which describe the route in the OpenAPI document.
    `takes`: schema of the request body. `answers`: type of a response with status 200. `events`: type of a
    stream's events. `statuses`: error statuses in addition to `ANY`. `errors`: type of an error body."""
    error = {"application/json": {"schema": _referred(errors)}}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": STATUSES[status], "content": error} for status in sorted({*ANY, *statuses})
    }
    good: dict[str, Any] = {"description": "The answer."}
    if answers is not None:
        good["content"] = {"application/json": {"schema": _referred(answers)}}
    if events is not None:
        good["description"] = "The answer; with `stream`, the data of each event (`[DONE]` beside)."
        good["content"]["text/event-stream"] = {"schema": _referred(events)}
    more: dict[str, Any] = {}
    if takes is not None:
        body = {"application/json": {"schema": _referred(takes)}}
        more["requestBody"] = {"required": True, "content": body}
    if takes is not None and events is not None:
        more["parameters"] = [LAST_EVENT_ID]
    return {"responses": {200: good, **responses}, "openapi_extra": more}


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application, to which all routes have been added before."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    error = _referred(ErrorAnswer)
    for methods in made["paths"].values():
        for operation in methods.values():
            _complete(operation, error)
    shapes: dict[str, Any] = {}
    for name in sorted(set(REFERRED.findall(json.dumps(made["paths"]))) & set(_shapes)):
        _add(name, _schema_of(_shapes[name]), shapes)
    made["components"] = {
        "schemas": shapes,
        "securitySchemes": {KEY: {"type": "http", "scheme": "bearer"}},
    }
    made["security"] = [{KEY: []}, {}]
    return made


def _referred(shape: AnswerType) -> dict[str, Any]:
    """Return a JSON Schema reference to a type, and register the type by its name. Raises AssertionError if
    another type has the same name."""
    name: str = shape.__name__
    if _shapes.setdefault(name, shape) is not shape:
        raise AssertionError(f"two shapes are called {name}")
    return {"$ref": REFERENCE.format(model=name)}


def _complete(operation: dict[str, Any], error: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's status for an invalid field: here it is 400
    for status in ANY:
        content = {"application/json": {"schema": error}}
        responses.setdefault(str(status), {"description": STATUSES[status], "content": content})


def _add(name: str, schema: dict[str, Any], shapes: dict[str, Any]) -> None:
    """Add a schema and its definitions to `shapes`, by name. Raises AssertionError if two schemas have the
    same name."""
    own = {name: {key: value for key, value in schema.items() if key != "$defs"}}
    for each, shape in (own | schema.get("$defs", {})).items():
        if shapes.setdefault(each, shape) != shape:
            raise AssertionError(f"two shapes are called {each}")


@cache
def _schema_of(shape: AnswerType) -> dict[str, Any]:
    """Return the JSON schema of a request body as it is accepted, including ignored fields, or of a response
    as it is sent."""
    if not isinstance(shape, type) or not issubclass(shape, Shape):
        answer = TypeAdapter(shape).json_schema(ref_template=REFERENCE, mode="serialization")
        return {"title": shape.__name__, **answer}
    schema: dict[str, Any] = _bounded(shape.model_json_schema(ref_template=REFERENCE))
    fields = schema["properties"]
    for name in sorted(shape.unserved.ignored):
        fields.setdefault(name, {"description": "Taken without effect."})
    for name, values in sorted(shape.unserved.harmless.items()):
        fields.setdefault(name, {"enum": [None, *values], "description": "Nothing else is served."})
    return schema


def _bounded(schema: Any) -> Any:
    """Return the schema with JSON Schema's names for number bounds, and with `anyOf` for unions without a
    discriminator. pydantic writes its own names, such as `ge`, where a number is converted first."""
    match schema:
        case {"oneOf": schemas, **others} if "discriminator" not in others:
            return _bounded({**others, "anyOf": schemas})
        case dict():
            return {
                BOUNDS[name] if name in BOUNDS and isinstance(each, int | float) else name: _bounded(each)
                for name, each in schema.items()
            }
        case list():
            return [_bounded(each) for each in schema]
        case _:
            return schema
