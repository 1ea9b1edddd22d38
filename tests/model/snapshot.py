"""Snapshots of a rank: kept, compared and restored.

`frozen` is everything of an object that its later behaviour can depend on, as one hashable value: every
attribute, of whatever class, so that the checker knows nothing of the classes it checks. Two ranks that
are frozen alike behave alike. `dump` and `load` make an independent copy, memory views included.
"""

import ctypes
import io
import pickle
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, Final

OBSERVED_ONLY: Final = frozenset({"dropped", "phase_ms", "problem"})
"""Attributes that the product only writes, such as metrics, and never reads to decide."""

PAUSES: Final = frozenset({"pause_s", "_pause_s", "_unnamed_pause_s", "_is_answered"})
"""Attributes that decide how long a pause is, and nothing else: pauses pass at once."""

GIVEN: Final = frozenset({"_make", "layout", "_deadlines", "request", "request_id", "owner", "_owner"})
"""Attributes given at creation, equal in every state of a scope for the same room."""

_LEFT_OUT: Final = OBSERVED_ONLY | PAUSES | GIVEN
_LEAVES: Final[set[type]] = {int, str, bytes, bool, float, type(None)}
"""Kinds whose instances are hashable by content as they are."""

Freeze = Callable[[Any], Hashable]
_HOW: Final[dict[type, Freeze]] = {}


def frozen(value: Any) -> Hashable:
    """`value` and all it refers to, by content. Order in sequences and mappings counts."""
    kind = type(value)
    if kind in _LEAVES:
        return value  # type: ignore[no-any-return]
    how = _HOW.get(kind)
    if how is None:
        if issubclass(kind, (Enum, type)) or _is_a_value(kind):
            _LEAVES.add(kind)
            return value  # type: ignore[no-any-return]
        how = _HOW[kind] = _how(kind)
    return how(value)


def _how(kind: type) -> Freeze:
    if issubclass(kind, (tuple, list, deque)):
        return lambda each: tuple(map(frozen, each))
    if issubclass(kind, Mapping):
        return lambda each: (tuple(map(frozen, each)), tuple(map(frozen, each.values())))
    if issubclass(kind, Set):
        return lambda each: frozenset(map(frozen, each))
    if issubclass(kind, (bytearray, memoryview)):
        return bytes
    if slots := _slots(kind):
        if len(slots) == 1:
            return lambda each: (kind.__qualname__, frozen(getattr(each, slots[0])))
        fields = attrgetter(*slots)
        return lambda each: (kind.__qualname__, tuple(map(frozen, fields(each))))
    return lambda each: (
        kind.__qualname__,
        tuple(frozen(held) for name, held in vars(each).items() if name not in _LEFT_OUT),
    )


def _is_a_value(kind: type) -> bool:
    """A frozen dataclass: equal and hashed by its fields. (One with a mutable field raises TypeError when
    it is looked up, and is never taken for another.)"""
    return is_dataclass(kind) and kind.__hash__ is not None and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def load(dumped: bytes) -> Any:
    return pickle.loads(dumped)


def _slots(kind: type) -> tuple[str, ...]:
    names = [name for each in reversed(kind.__mro__) for name in each.__dict__.get("__slots__", ())]
    return tuple(name for name in names if name not in _LEFT_OUT)


class _Pickler(pickle.Pickler):
    """Copies share what cannot change. A view becomes the part of its memory that it shows, so that both
    stay tied in the copy."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind in _LEAVES or issubclass(kind, Enum) or _is_a_value(kind):
            return _shared, (_share(value),)
        if kind is not memoryview:
            return NotImplemented
        memory = value.obj
        if not isinstance(memory, bytearray):
            raise TypeError(f"a view of {type(memory).__name__} cannot be copied")
        start = _address(value) - _address(memoryview(memory)) if len(value) else 0
        return _view, (memory, start, len(value))


_values: Final[list[Any]] = []
_value_numbers: Final[dict[tuple[type, Any], int]] = {}


def _share(value: Any) -> int:
    number = _value_numbers.setdefault((type(value), value), len(_values))
    if number == len(_values):
        _values.append(value)
    return number


def _shared(number: int) -> Any:
    return _values[number]


def _view(memory: bytearray, start: int, length: int) -> memoryview:
    return memoryview(memory)[start : start + length]


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
