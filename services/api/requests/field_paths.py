"""By what path did a caller write what the chat request that was made of its body calls otherwise?

Other APIs are served by translating their bodies into chat requests. Whatever is found wrong with such a
request later is told in the terms of the body that it came from.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from baton.api.errors import ApiError
from baton.api.requests.schemas import Shape, fields_of
from baton.api.requests.validation_errors import first_fault

QUOTED: Final = re.compile(r"'([a-z_]+(?:\[\d+\]|\.[a-z_]+)*)'")
"""A path as messages name it; what a caller called something is in double quotes."""

M = TypeVar("M", bound=Shape)


@dataclass(slots=True)
class FieldPaths:
    """Of one request. Filled as it is translated."""

    paths: dict[str, str] = field(default_factory=dict)
    """The caller's, by the chat request's. What stands under a path keeps its own steps, unless they have an
    entry, too."""

    def own(self, path: str) -> str:
        """The caller's path."""
        known = path
        while known not in self.paths:
            cut = max(known.rfind("."), known.rfind("["))
            if cut <= 0:
                return path
            known = known[:cut]
        return self.paths[known] + path[len(known) :]

    @contextmanager
    def spoken(self) -> Iterator[None]:
        """What is raised within is told in the caller's terms."""
        try:
            yield
        except ApiError as error:
            raise self.told(error) from None

    def told(self, error: ApiError) -> ApiError:
        message = QUOTED.sub(lambda found: f"'{self.own(found[1])}'", str(error))
        param = None if error.param is None else self.own(error.param)
        return ApiError(
            error.status, message, kind=error.kind, param=param, code=error.code, headers=error.headers
        )


def made(shape: type[M], fields: dict[str, Any], terms: FieldPaths) -> M:
    """`shape` of what a body was translated into. Raises ApiError in the body's terms."""
    try:
        return shape.model_validate(fields)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise terms.told(first_fault(faults, fields, fields_of(shape), shape.unserved)) from None
