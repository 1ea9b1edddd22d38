"""How does a process come to run a mutant, while the checkout stays as it is?

The one module that the mutant changes is compiled from the changed text, whoever imports it. Nothing of the
product may have been imported before.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType

from tests.mutants.mutant import Mutant


class _Changed(SourceFileLoader):
    """Ignores the cached bytecode, which is the unchanged module's."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(mutant.path))
        self._source = mutant.source()

    def get_source(self, fullname: str) -> str:
        return self._source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._changed = _Changed(mutant)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        return spec_from_file_location(fullname, self._mutant.path, loader=self._changed)


def put_in_place(mutant: Mutant) -> None:
    """For the rest of this process. Raises Drifted."""
    if mutant.module in sys.modules:
        raise RuntimeError(f"{mutant.module} was imported before its mutant could be put in place")
    sys.meta_path.insert(0, _Finder(mutant))
