"""An import hook that runs a mutant in this process and leaves the checkout unchanged.

Each module that the mutant changes is compiled from the changed text, whichever module imports it. It has to
be in place before anything of the product is imported."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from tests.mutants.mutant import Mutant
from tests.suite.test_imports import module_name


class _Changed(SourceFileLoader):
    """Loads the changed text. The cached bytecode is of the unchanged module and is not read."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        super().__init__(module, str(path))
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, changed: _Changed) -> None:
        self._changed = changed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._changed.name:
            return None
        return spec_from_file_location(fullname, self._changed.path, loader=self._changed)


def put_in_place(mutant: Mutant) -> None:
    """Make later imports in this process compile the mutant's source. Raises Drifted if it does not fit."""
    for path, source in mutant.sources().items():
        module = module_name(path)
        if module in sys.modules:
            raise RuntimeError(f"{module} was imported before its mutant could be put in place")
        sys.meta_path.insert(0, _Finder(_Changed(module, path, source)))
