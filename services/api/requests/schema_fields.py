"""Field names of the JSON objects in a request body, by path of the object."""

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel


@cache
def fields_of(schema: type[BaseModel]) -> dict[str, tuple[str, ...]]:
    """Return the field names of each object in a body of this schema, by path of the object.
    `validation_errors` uses them. Objects that may have any fields are left out."""
    known: dict[str, tuple[str, ...]] = {}
    for path, each in _within(schema, ""):
        known[path] = (*known.get(path, ()), *names_of(each))
    return known


def _within(schema: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield a schema and, recursively, the schemas of its fields. Each comes with its path."""
    yield path, schema
    for name, field in schema.model_fields.items():
        here = f"{path}.{field.alias or name}".lstrip(".")
        for steps, each in _schemas_of(field.annotation, here):
            yield from _within(each, steps)


def _schemas_of(annotation: Any, path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    is_schema = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    if is_schema and annotation.model_config.get("extra") == "forbid":
        yield path, annotation
    for each in get_args(annotation):
        yield from _schemas_of(each, f"{path}.[]" if get_origin(annotation) is list else path)


def names_of(schema: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of a schema's fields, as clients write them."""
    return tuple(field.alias or name for name, field in schema.model_fields.items())
