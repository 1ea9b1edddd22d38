"""Paths by which a caller wrote what the chat request made of its body names otherwise.

Other APIs are served by translating their bodies into chat requests. Errors of such a request name the
fields of the original body.
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
"""A path in an error message. Names that a caller chose are in double quotes."""

M = TypeVar("M", bound=Shape)


@dataclass(slots=True)
class FieldPaths:
    """The caller's paths of one request. Filled while it is translated."""

    paths: dict[str, str] = field(default_factory=dict)
    """The caller's paths, by the chat request's. A path below one of them keeps its own steps, unless it
    has an entry, too."""

    def own(self, path: str) -> str:
        """Return the caller's path."""
        known = path
        while known not in self.paths:
            cut = max(known.rfind("."), known.rfind("["))
            if cut <= 0:
                return path
            known = known[:cut]
        return self.paths[known] + path[len(known) :]

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Translate errors that are raised within the block."""
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
    """Return `shape` of a translated body. Raises ApiError with the caller's paths."""
    try:
        return shape.model_validate(fields)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise terms.translate(first_fault(faults, fields, fields_of(shape), shape.unserved)) from None
