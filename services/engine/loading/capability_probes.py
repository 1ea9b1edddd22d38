"""Is this a model whose attention we compute as its authors meant it?

Two looks. `refuse_by_configuration` reads what the model says of itself, before any weight is loaded.
`AttentionProbe` stands in for the attention during one small forward pass and sees what each layer really
asks for: a model that asks for something not known here is refused, so that nothing wrong is ever computed.

A look has to come out differently in the wrong case (`probe-can-fail`). So the pass has what steps have, a
later chunk of one sequence and behind it the beginning of another, and is held against one in which the
definition counts the positions of a single sequence itself. A definition that counts a step's tokens from 0,
or that lets a token see its neighbours outside its attention, gives other queries, keys and values there. A
window is wider than any small pass, so what a layer sees is asked of the function that the definition makes
its mask of, at the context's borders (`attention.py`). A scale that begins late in the context is seen in a
pass at its end, against one whose place there the definition is told by a cache.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isnan
from typing import Any, Final

import torch
from transformers import AttentionMaskInterface, DynamicCache

from baton.engine.execution.attention_span import (
    ATTENTION_NAME,
    MASK,
    Geometry,
    LayerAttention,
    MaskFunction,
    UnknownSpan,
    attention_options,
    find_span,
)
from baton.engine.loading.text_model import maker_of, text_of
from baton.models.model_facts import UnsupportedModel
from baton.models.model_requirements import (
    BLOCKS,
    DIFFERING,
    DRAWS,
    ENCODER,
    LATENT,
    LATER,
    OTHER_LAYERS,
    SEEING,
    SHARED,
    in_order,
)

HEEDED: Final = frozenset(
    {"scaling", "softcap", "s_aux", "sliding_window", MASK}
    | {"dropout", "position_ids", "position_embeddings", "cache_position", "use_cache"}
    | {"logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
)
"""Options of an attention call that are looked at by themselves, or change nothing when tokens are drawn."""
OPTION_NAMES: Final = {
    MASK: "an attention mask of its own",
    "is_causal": LATER,
}
WINDOW: Final = "a window that its mask does not have"
OTHER_SHAPES: Final = "keys and values of differing shapes"
COUNTING: Final = "positions that it counts by itself, or tokens that see others outside its attention"
TOLERANCES: Final = {"float32": 1e-3, "bfloat16": 0.1}
"""Of what a layer sees twice, how long the difference may be, as a share of its length."""
ROUNDING: Final = {"float32": 1e-5, "bfloat16": 0.004}
"""How much of it may be rounding in the first layer."""
CONTRAST: Final = 4
"""So many times farther the first layer has to be from what a wrong place gives."""
PROBED: Final = 8
"""Tokens of the small pass."""


def places(context_length: int) -> torch.Tensor:
    """The positions of the small pass: a later chunk, and behind it a beginning. None is where it would be
    counted from 0."""
    count = min(PROBED, context_length)
    return torch.arange(count).roll(count // 2)


def refuse_by_configuration(name: str, config: Any, known: Sequence[str] = ()) -> None:
    """Raise UnsupportedModel, with all that is missing, if the library's `config`, or that of its text, asks
    for it. `known`: what was found to be missing before."""
    text = text_of(config)
    found = [*known, *(what for what, asks in NEEDS.items() if asks(config) or asks(text))]
    if maker_of(config) is None:
        found.append(DRAWS)
    if not _told(text, "is_encoder_decoder"):
        layers = {str(kind) for kind in _told(text, "layer_types") or ()} - SEEING
        found += [OTHER_LAYERS.get(kind, f"layers of type {kind}") for kind in sorted(layers)]
    _refuse(name, _told(config, "model_type"), in_order(found))


@contextmanager
def recording_masks() -> Iterator[None]:
    """Within it, definitions with our attention make masks, which know the function that they are made of;
    outside of it they make none."""
    AttentionMaskInterface.register(ATTENTION_NAME, _told_mask)
    try:
        yield
    finally:
        del AttentionMaskInterface._global_mapping[ATTENTION_NAME]


class ProbedMask(torch.Tensor):
    """Of no values that count: what it stands for is what `function` lets be seen."""

    function: MaskFunction


def _told_mask(*, mask_function: MaskFunction, q_length: int, kv_length: int, **_: object) -> torch.Tensor:
    told = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool).as_subclass(ProbedMask)
    told.function = mask_function
    return told


class CountedPositions:
    """A cache as definitions ask it, which holds nothing: it tells how many tokens came before the step's
    first."""

    is_compileable = False

    def __init__(self, before: int | torch.Tensor) -> None:
        """`before`: of each token of the step, less those that came before it in the step, where they are of
        several sequences."""
        self._before = before
        self.layers: list[object] = []
        self.is_sliding: list[bool] = []

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        del layer_idx
        return self._before

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


class AttentionProbe:
    """An attention that notes what it is asked for, and answers with zeros."""

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self._calls: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._needs: list[str] = []
        self.attention: dict[int, LayerAttention] = {}
        """Of each layer that was seen. How far it sees is there where the pass was one of
        `recording_masks`."""
        self._windows: dict[int, int] = {}
        """What its calls say beside their masks."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self._calls:
            self._needs.append("attention that is not once per numbered layer")
        else:
            self._calls[layer] = (query, key, value)
            self._see(layer, query, options)
        if getattr(module, "is_causal", True) is False:
            self._needs.append(OPTION_NAMES["is_causal"])
        for option, asked in options.items():
            if option in HEEDED or asked is None or (option == "is_causal" and asked is True):
                continue
            self._needs.append(OPTION_NAMES.get(option, f"the attention option {option}"))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def miss(self, need: str) -> None:
        """`need` is missing too."""
        self._needs.append(need)

    def _see(self, layer: int, query: torch.Tensor, options: dict[str, Any]) -> None:
        mask, window = options[MASK], options.get("sliding_window")
        attention = attention_options(query, options)
        if attention.sinks is not None and attention.sinks.shape != query.shape[1:2]:
            self._needs.append("attention sinks that are not one a head")
        if isinstance(mask, ProbedMask):
            try:
                attention = replace(attention, span=find_span(mask.function, self._context_length))
            except (UnknownSpan, RuntimeError, LookupError, TypeError, AttributeError):
                self._needs.append(OPTION_NAMES[MASK])
        elif mask is not None:
            self._needs.append(OPTION_NAMES[MASK])
        self.attention[layer] = attention
        if isinstance(window, int):
            self._windows[layer] = window

    def verdict(
        self,
        whole: "AttentionProbe",
        counted: "AttentionProbe",
        order: torch.Tensor,
        dtype: str,
        name: str,
        config: Any,
        layers: Sequence[int] | None = None,
    ) -> Geometry:
        """What was seen in a forward pass of `layers` (of all, if not said), in numbers of `dtype`, of tokens
        at the positions `order`. `whole`: saw them as one sequence, whose positions the definition counted,
        with its masks. `counted`: saw them as here, but for that the definition counted. Raises
        UnsupportedModel."""
        total = int(text_of(config).num_hidden_layers)
        if sorted(self._calls) != list(range(total) if layers is None else layers):
            self._needs.append("layers without the library's common attention")
        shapes = [(query.shape, key.shape, value.shape) for query, key, value in self._calls.values()]
        if len(set(shapes)) > 1:
            self._needs.append("layers of differing shapes")
        for query, key, value in shapes:
            if key != value or query[3] != key[3] or query[1] % key[1]:
                self._needs.append(OTHER_SHAPES)
        self._needs += whole._needs
        seen = {
            layer: attention.span and attention.span.tokens for layer, attention in whole.attention.items()
        }
        said = (*whole._windows.items(), *cached_windows(config).items())
        if any(seen.get(layer, window) != window < self._context_length for layer, window in said):
            self._needs.append(WINDOW)
        if not self._needs and not self._placed(whole, counted, order, dtype):
            self._needs.append(COUNTING)
        _refuse(name, _told(config, "model_type"), self._needs)
        query, key, _ = shapes[0]
        return Geometry(total, query_heads=query[1], kv_heads=key[1], head_dim=key[3])

    def like(self, other: "AttentionProbe", dtype: str) -> bool:
        """Whether each layer saw what `other` saw in its place."""
        return self._calls.keys() == other._calls.keys() and all(
            gap(mine, its) <= ROUNDING[dtype] for mine, its in self._beside(other)
        )

    def turned(self, other: "AttentionProbe", tolerance: float) -> bool:
        """Whether each query, key and value is as long as the one that `other` saw in its place."""
        lengths = [[each.float().norm(dim=-1) for each in pair] for pair in self._beside(other)]
        return all(float((mine - its).norm()) <= tolerance * float(its.norm()) for mine, its in lengths)

    def _placed(
        self, whole: "AttentionProbe", counted: "AttentionProbe", order: torch.Tensor, dtype: str
    ) -> bool:
        """Whether each layer sees a token as it is seen at its place in `whole`. The first, in which hardly
        anything is rounded, has to be much nearer to that than to what is seen where it is `counted`: some
        embeddings of positions are small beside those of tokens."""
        gaps = [
            (gap(mine, its[:, :, order]), gap(mine, other))
            for (mine, its), (_, other) in zip(self._beside(whole), self._beside(counted), strict=True)
        ]
        first_right, first_wrong = (max(each) for each in zip(*gaps[:3], strict=True))
        nearer = first_right <= ROUNDING[dtype] or first_right <= first_wrong / CONTRAST
        return nearer and not any(right > TOLERANCES[dtype] for right, _ in gaps)

    def _beside(self, other: "AttentionProbe") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for layer, seen in self._calls.items():
            yield from zip(seen, other._calls[layer], strict=True)


def gap(seen: torch.Tensor, right: torch.Tensor) -> float:
    """How far `seen` is from `right`, as a share of that; 0 where a number is none."""
    share = float((seen.float() - right.float()).norm() / right.float().norm())
    return 0.0 if isnan(share) else share


def cached_windows(config: Any) -> dict[int, int]:
    """How many tokens of a layer the library itself keeps as it draws, where that is not all: a definition
    whose masks let more be seen is not sure of it, as Moshi's."""
    layers = DynamicCache(config=text_of(config)).layers
    kept = {index: getattr(layer, "sliding_window", None) for index, layer in enumerate(layers)}
    return {index: tokens for index, tokens in kept.items() if isinstance(tokens, int)}


def _refuse(name: str, model_type: object, needs: Iterable[str]) -> None:
    found = list(dict.fromkeys(needs))
    if found:
        raise UnsupportedModel.needing(name, model_type, found)


def _told(config: Any, key: str) -> Any:
    """A value of the whole model's; None where there is none. One that differs by layer the library does not
    give: it raises an error of its own."""
    try:
        return getattr(config, key, None)
    except Exception:
        return None


NEEDS: Final[dict[str, Callable[[Any], bool]]] = {
    DIFFERING: lambda config: bool(_told(config, "is_heterogeneous")),
    ENCODER: lambda config: bool(_told(config, "is_encoder_decoder")),
    LATENT: lambda config: bool(_told(config, "kv_lora_rank")),
    LATER: lambda config: (
        bool(_told(config, "use_bidirectional_attention")) or _told(config, "is_causal") is False
    ),
    BLOCKS: lambda config: _told(config, "attention_type") == "block_sparse",
    SHARED: lambda config: bool(_told(config, "num_kv_shared_layers")),
}
