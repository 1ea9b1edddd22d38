"""JSON schemas of requests as the JSON text from which workers make a grammar."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic_core import to_json

from baton.api.errors import invalid
from baton.api.requests.field_types import OPTIONS
from baton.api.tools.constraints.schema_alternatives import with_disjoint_alternatives
from baton.api.tools.constraints.schema_normalization import normalized, without_nulls
from baton.api.tools.constraints.schema_shapes import SchemaRefused, check_shape
from baton.api.tools.constraints.strict_schemas import without_unnamed_properties
from baton.grammars.json_schema import resolved, schemas_within
from baton.rooms.request import GRAMMAR_BYTES_MAX


def schema_text(param: str, schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return a JSON schema as JSON text, normalized for the grammar library. Raises ApiError.

    `param`: field of the request with the schema. `options`: options for the grammar library, which are
    written into the schema.
    """
    try:
        if len(to_json(schema)) > GRAMMAR_BYTES_MAX:
            raise invalid(param, f"'{param}' is larger than {GRAMMAR_BYTES_MAX} bytes.")
    except ValueError:
        pass  # too deep to be written: `without_nulls` refuses it
    try:
        given = without_nulls(schema)
        for each in schemas_within(given):
            check_shape(each)
        given = with_disjoint_alternatives(given, partial(resolved, given))  # before objects are closed
        made = normalized(without_unnamed_properties(given))
    except SchemaRefused as error:
        why = f"no answer can be held to it: {error}."
        raise invalid(param, f"Invalid value for '{param}': {why}") from None
    return to_json({**made, OPTIONS: options}).decode()
