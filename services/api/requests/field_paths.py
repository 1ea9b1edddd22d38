"""Translation of field paths in errors into the paths of the client's own body.

The bodies of other APIs are translated into chat requests. An error in such a chat request has to name the
field of the original body.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from baton.api.errors import ApiError
from baton.api.requests.schema_fields import fields_of
from baton.api.requests.schemas import Shape
from baton.api.requests.validation_errors import first_fault

QUOTED: Final = re.compile(r"'([a-z_]+(?:\[\d+\]|\.[a-z_]+)*)'")
"""Pattern of a quoted field path in an error message. Names that a client chose are in double quotes."""

M = TypeVar("M", bound=Shape)


@dataclass(slots=True)
class FieldPaths:
    """Map from the field paths of a chat request to those of the client's body, for error messages. It is
    filled while the body is translated into the chat request."""

    paths: dict[str, str] = field(default_factory=dict)
    """Field path in the client's body, by field path in the chat request. An entry also holds for the paths
    below it, unless they have their own entries."""

    def own(self, path: str) -> str:
        """Return the field path in the client's body for `path`, the path of the same field in the chat
        request."""
        known = path
        while known not in self.paths:
            cut = max(known.rfind("."), known.rfind("["))
            if cut <= 0:
                return path
            known = known[:cut]
        return self.paths[known] + path[len(known) :]

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Translate the field paths of each ApiError that is raised within the block."""
        try:
            yield
        except ApiError as error:
            raise self.translate(error) from None

    def translate(self, error: ApiError) -> ApiError:
        message = QUOTED.sub(lambda found: f"'{self.own(found[1])}'", str(error))
        param = None if error.param is None else self.own(error.param)
        return ApiError(
            error.status, message, kind=error.kind, param=param, code=error.code, headers=error.headers
        )


def made(shape: type[M], fields: dict[str, Any], terms: FieldPaths) -> M:
    """Return the chat request with the given `fields`, into which a client's body was translated, validated
    as `shape`. Raises ApiError with field paths of the client's body."""
    try:
        return shape.model_validate(fields)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise terms.translate(first_fault(faults, fields, fields_of(shape), shape.unserved)) from None
