"""Mapping from the weights in files to the parameters of an implementation.

The transformers library renames and joins weights as it loads them: single experts become one tensor, two
projections become one. Here that mapping is applied backwards, as data. Each parameter is a tree whose leaves
are weights in files. For a part of a parameter, only the parts of files that it needs are read.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from transformers import core_model_loading as library
from transformers.conversion_mapping import get_model_conversion_mapping

from baton.engine.loading.single_experts import joining_single_experts

Box = tuple[range, ...]
"""Selected indices of a weight, as one range for each dimension."""


class UnknownOperation(Exception):
    """The transformers library makes a parameter by an operation that is not implemented here. The text names
    the operation."""


class ShapesDiffer(Exception):
    """Weights that the transformers library would join have shapes that do not fit. The text names one of the
    weights."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a weight along one dimension: the indices in `ranges`, one range after the other."""

    dim: int
    ranges: tuple[range, ...]

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this part, cut out of a weight of the given `shape`."""
        return (*shape[: self.dim], len(self), *shape[self.dim + 1 :])


class Weights(Protocol):
    """The weights in a model's files: their names, their shapes, and parts of their numbers."""

    @property
    def names(self) -> Collection[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the numbers of the weight called `name` at the indices in `box`, one range per dimension.
        Raises ModelUnreadable."""


class Source(Protocol):
    """Node of a tree that describes how a parameter is made from the weights in a model's files. Leaves are
    single weights."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def names(self) -> list[str]:
        """Names of the weights in the model's files from which this source is made."""

    def into(self, out: torch.Tensor, box: Box) -> None:
        """Copy the source's numbers at the indices in `box` to `out`, which has the shape of `box`. Raises
        ModelUnreadable."""


def read_source(source: Source, cut: Cut | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the numbers of `source`, or of its part `cut`, in new memory on `device`. Raises
    ModelUnreadable."""
    whole = tuple(map(range, source.shape))
    if cut is None:
        cut = Cut(0, whole[:1]) if whole else None
    if cut is None:
        out = torch.empty((), dtype=dtype, device=device)
        source.into(out, ())
        return out
    out = torch.empty(cut.of(source.shape), dtype=dtype, device=device)
    begin = 0
    for part in cut.ranges:
        source.into(out.narrow(cut.dim, begin, len(part)), (*whole[: cut.dim], part, *whole[cut.dim + 1 :]))
        begin += len(part)
    return out


@dataclass(frozen=True, slots=True)
class FileWeight:
    """Source that is a single weight in a file."""

    weights: Weights
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.shape(self.name)

    @property
    def names(self) -> list[str]:
        return [self.name]

    def into(self, out: torch.Tensor, box: Box) -> None:
        spans = tuple(_span(each) for each in box)
        steps = tuple(slice(None, None, each.step) for each in box)
        # Copied: a view would keep its whole file mapped.
        out.copy_(self.weights.read(self.name, spans)[steps])


def _span(places: range) -> range:
    """Return the range without gaps from the first to the last of the ascending indices `places`."""
    return range(places[0], places[-1] + 1) if places else range(0)


@dataclass(frozen=True, slots=True)
class Stacked:
    """Source that stacks sources of equal shape along a new dimension."""

    parts: tuple[Source, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.parts[0].shape
        return (*shape[: self.dim], len(self.parts), *shape[self.dim :])

    @property
    def names(self) -> list[str]:
        return [name for part in self.parts for name in part.names]

    def into(self, out: torch.Tensor, box: Box) -> None:
        rest = (*box[: self.dim], *box[self.dim + 1 :])
        for offset, index in enumerate(box[self.dim]):
            self.parts[index].into(out.select(self.dim, offset), rest)


@dataclass(frozen=True, slots=True)
class Joined:
    """Source that concatenates other sources along a dimension."""

    parts: tuple[Source, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.parts[0].shape
        size = sum(part.shape[self.dim] for part in self.parts)
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    @property
    def names(self) -> list[str]:
        return [name for part in self.parts for name in part.names]

    def into(self, out: torch.Tensor, box: Box) -> None:
        selected, begin, index = box[self.dim], 0, 0
        for part in self.parts:
            stop = begin + part.shape[self.dim]
            selected_here = selected[_before(begin, selected) : _before(stop, selected)]
            if selected_here:
                own = range(selected_here.start - begin, selected_here.stop - begin, selected_here.step)
                part.into(
                    out.narrow(self.dim, index, len(selected_here)),
                    (*box[: self.dim], own, *box[self.dim + 1 :]),
                )
            begin, index = stop, index + len(selected_here)


def _before(border: int, places: range) -> int:
    """Return how many of the ascending indices `places` are less than `border`."""
    return len(range(places.start, min(places.stop, border), places.step))


@dataclass(frozen=True, slots=True)
class SelectedPlaces:
    """Source that selects some indices of another source along a dimension."""

    part: Source
    dim: int
    places: range

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.part.shape
        return (*shape[: self.dim], len(self.places), *shape[self.dim + 1 :])

    @property
    def names(self) -> list[str]:
        return self.part.names

    def into(self, out: torch.Tensor, box: Box) -> None:
        selected = box[self.dim]
        own = self.places[selected.start : selected.stop : selected.step]
        self.part.into(out, (*box[: self.dim], own, *box[self.dim + 1 :]))


@dataclass(frozen=True, slots=True)
class Transposed:
    """Source that exchanges two dimensions of another source."""

    part: Source
    first: int
    second: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._transposed(self.part.shape))

    @property
    def names(self) -> list[str]:
        return self.part.names

    def into(self, out: torch.Tensor, box: Box) -> None:
        self.part.into(out.transpose(self.first, self.second), tuple(self._transposed(box)))

    def _transposed(self, sides: Sequence[Any]) -> list[Any]:
        turned = list(sides)
        turned[self.first], turned[self.second] = sides[self.second], sides[self.first]
        return turned


# ---- the library's mapping


@dataclass(frozen=True, slots=True)
class ConvertedParameter:
    """One or several parameters that a converter of the transformers library makes out of weights."""

    converter: Any
    target: str
    """Name of the parameter that the converter makes, or of the first one if it makes several."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each parameter of the transformers implementation, by parameter name."""
    config: Any

    @property
    def targets(self) -> list[str]:
        return list(self.converter.target_patterns)

    @property
    def sources(self) -> list[str]:
        return list(self.converter.source_patterns)

    def only_target(self) -> str:
        return _only(self.targets)


Parts = dict[str, list[Source]]
"""Sources made so far while a parameter's conversion is followed, by the name patterns of transformers'
converter."""


def sources_of(module: Any, weights: Weights) -> dict[str, Source]:
    """Return the source of each parameter and persistent buffer of `module`, a whole transformers
    implementation, by name.

    Parameters that `weights` cannot make are left out, and superfluous weights are ignored. Raises
    UnknownOperation or ShapesDiffer.
    """
    shapes = {name: tuple(each.shape) for name, each in module.state_dict().items()}
    with joining_single_experts():
        transforms = get_model_conversion_mapping(module)
    renamings = [each for each in transforms if isinstance(each, library.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, library.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = module.base_model_prefix
    found: dict[str, Source] = {}
    made: dict[str, tuple[Any, Parts]] = {}
    for name in sorted(weights.names, key=library.dot_natural_key):
        target, pattern = library.rename_source_key(name, renamings, converters, prefix, shapes)
        if target not in shapes and name in shapes:
            target, pattern = library.rename_source_key(name, [], [], prefix, shapes)
        if target not in shapes:
            continue
        if pattern is None:
            found.setdefault(target, FileWeight(weights, name))
        else:
            parts = made.setdefault(target, (by_pattern[pattern], {}))[1]
            parts.setdefault(pattern, []).append(FileWeight(weights, name))
    for target, (converter, parts) in made.items():
        found |= _made(ConvertedParameter(converter, target, shapes, module.config), parts)
    return found


def _made(making: ConvertedParameter, parts: Parts) -> dict[str, Source]:
    for operation in making.converter.operations:
        walk = WALKS.get(type(operation))
        if walk is None:
            raise UnknownOperation(type(operation).__name__)
        parts = walk(operation, parts, making)
    pattern = next((each for each in parts if each in making.target), None)
    if pattern is None:
        raise UnknownOperation(f"a conversion to {', '.join(parts)}")
    before, _, behind = making.target.partition(pattern)
    return {f"{before}{each}{behind}": _single(made) for each, made in parts.items()}


def _single(parts: list[Source]) -> Source:
    return parts[0]


def _only(patterns: Sequence[str]) -> str:
    if len(patterns) != 1:
        raise UnknownOperation(f"a conversion to {', '.join(patterns)}")
    return patterns[0]


def _stacked(operation: Any, parts: Parts, making: ConvertedParameter) -> Parts:
    one = len(parts) == 1
    return {
        making.only_target() if one else pattern: [Stacked(_same_shapes(each), operation.dim)]
        for pattern, each in parts.items()
    }


def _joined(operation: Any, parts: Parts, making: ConvertedParameter) -> Parts:
    in_order = [each for pattern in making.sources for each in parts.get(pattern, [])]
    return {making.only_target(): [Joined(_same_shapes(in_order, beside=operation.dim), operation.dim)]}


def _chunked(operation: Any, parts: Parts, making: ConvertedParameter) -> Parts:
    whole = _single(parts[_only(list(parts))])
    targets = operation.get_target_patterns(making.targets, config=making.config)
    size = whole.shape[operation.dim]
    each = -(-size // len(targets))
    return {
        target: [SelectedPlaces(whole, operation.dim, range(size)[index * each : (index + 1) * each])]
        for index, target in enumerate(targets)
    }


def _split(operation: Any, parts: Parts, making: ConvertedParameter) -> Parts:
    whole = _single(parts[_only(list(parts))])
    first, begin = making.targets[0], 0
    found: Parts = {}
    for target in making.targets:
        stop = begin + making.shapes[making.target.replace(first, target)][operation.dim]
        found[target] = [SelectedPlaces(whole, operation.dim, range(begin, stop))]
        begin = stop
    if begin != whole.shape[operation.dim]:
        raise ShapesDiffer(whole.names[0])
    return found


def _transposed(operation: Any, parts: Parts, making: ConvertedParameter) -> Parts:
    whole = _single(parts[_only(list(parts))])
    target = operation.get_target_pattern(parts, making.sources, making.targets)
    if operation.check_dims and whole.shape == making.shapes[making.target]:
        return {target: [whole]}
    return {target: [Transposed(whole, operation.dim0 % len(whole.shape), operation.dim1 % len(whole.shape))]}


def _deinterleaved(operation: Any, parts: Parts, making: ConvertedParameter) -> Parts:
    """Apply transformers' deinterleaving of a weight: even indices come first, then the odd ones."""
    if operation.inverse:
        raise UnknownOperation("Interleave, inverse")
    whole = _single(parts[_only(list(parts))])
    places = range(whole.shape[operation.dim])
    halves = tuple(SelectedPlaces(whole, operation.dim, places[first::2]) for first in (0, 1))
    return {making.targets[0]: [Joined(halves, operation.dim)]}


def _same_shapes(parts: Sequence[Source], beside: int | None = None) -> tuple[Source, ...]:
    """Return `parts`, which are to be joined. Raises ShapesDiffer unless their shapes agree in all dimensions
    but `beside`."""
    shapes = [[size for dim, size in enumerate(part.shape) if dim != beside] for part in parts]
    for part, shape in zip(parts, shapes, strict=True):
        if shape != shapes[0]:
            raise ShapesDiffer(part.names[0])
    return tuple(parts)


WALKS: Final[Mapping[type, Callable[[Any, Parts, ConvertedParameter], Parts]]] = {
    library.MergeModulelist: _stacked,
    library.Concatenate: _joined,
    library.Chunk: _chunked,
    library.Transpose: _transposed,
    library.Interleave: _deinterleaved,
    **({library.Split: _split} if hasattr(library, "Split") else {}),
}
"""Functions that apply an operation of transformers' weight conversion to sources instead of tensors, by the
operation's class.

transformers 5.19 has no `Split`.
"""
