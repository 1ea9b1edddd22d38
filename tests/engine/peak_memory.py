"""Measurement of the most bytes that tensors take at once during a computation."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes that operators of this thread allocate on a CPU, until they are freed.

    Tensors that they did not make, such as views of files, do not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        """Most bytes that were allocated at once."""
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in _storages((args, kwargs)):
            self._know(each, 0)
        made = func(*args, **(kwargs or {}))
        for each in _storages(made):
            self._know(each, each.nbytes())
        return made

    def _know(self, storage: torch.UntypedStorage, size: int) -> None:
        place = storage._cdata
        if place in self._known:
            return
        self._known.add(place)
        self._now += size
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)
        self._now -= size


def _storages(given: Any) -> list[torch.UntypedStorage]:
    leaves = tree_leaves(given)
    tensors = [each for each in leaves if isinstance(each, torch.Tensor) and each.device.type == "cpu"]
    of_none = [each for each in leaves if isinstance(each, torch.UntypedStorage)]
    return [each.untyped_storage() for each in tensors] + of_none
