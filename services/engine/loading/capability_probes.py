"""Checks that a model's attention is computed as its authors meant it.

There are two checks. `refuse_by_configuration` reads the model's configuration before any weight is loaded.
`AttentionProbe` takes the place of attention in small forward passes, and records the arguments of each
layer's call. A model that needs anything unknown is refused, so that nothing is computed wrongly.

A check has to fail in the wrong case (`probe-can-fail`). So the test pass has what steps have: a later chunk
of one sequence, followed by the beginning of another. It is compared with a pass in which the transformers
implementation counts the positions of a single sequence itself. Queries, keys and values differ there if an
implementation counts a step's tokens from 0, or mixes tokens outside its attention.
A window is wider than any small pass. So spans are derived from the function from which the implementation
makes its mask, around the context's borders (`attention_span.py`). A scale that begins late in the context
shows in a pass at its end, compared with one in which a cache gives the position.
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
from baton.engine.execution.latent_attention import absorbed, defers_expansion, expanded, projected
from baton.engine.loading.text_model import maker_of, text_of
from baton.models.model_facts import UnsupportedModel
from baton.models.model_requirements import (
    BLOCKS,
    DIFFERING,
    DRAWS,
    ENCODER,
    LATER,
    NO_MIXER,
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
"""Names of the arguments of an attention call that the probe knows: their values are checked, or they change
nothing in inference."""
OPTION_NAMES: Final = {
    MASK: "an attention mask of its own",
    "is_causal": LATER,
}
WINDOW: Final = "a window that its mask does not have"
OTHER_SHAPES: Final = "keys and values of differing shapes"
COUNTING: Final = "positions that it counts by itself, or tokens that see others outside its attention"
TOLERANCES: Final = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest relative difference between two test passes that counts as agreement, by number format."""
ROUNDING: Final = {"float32": 1e-5, "bfloat16": 0.004}
"""Largest accepted relative difference of queries, keys and values in the first layer, in which hardly
anything is rounded, by number format."""
CONTRAST: Final = 4
"""Factor in the check of positions. In the first layer, results at wrong positions have to differ at least so
many times as much as those at right ones."""
PROBED: Final = 8
"""Number of tokens in the small forward pass that checks a model."""


def probe_positions(context_length: int) -> torch.Tensor:
    """Return the positions of the tokens in the test pass: a later chunk of one sequence, then the beginning
    of another.

    No position is the one that counting from 0 would give.
    """
    count = min(PROBED, context_length)
    return torch.arange(count).roll(count // 2)


def refuse_by_configuration(name: str, config: Any, known: Sequence[str] = ()) -> None:
    """Raise UnsupportedModel if the transformers `config` or its text part needs features that are not
    implemented.

    The error names all of them, including `known`, those found before. `name`: name of the model.
    """
    text = text_of(config)
    found = [*known, *(what for what, asks in NEEDS.items() if asks(config) or asks(text))]
    if maker_of(config) is None:
        found.append(DRAWS)
    if not _setting(text, "is_encoder_decoder"):
        layers = {str(kind) for kind in _setting(text, "layer_types") or ()}
        found += [
            f"layers of type {kind}" for kind in sorted(layers - SEEING - NO_MIXER - OTHER_LAYERS.keys())
        ]
    _refuse(name, _setting(config, "model_type"), in_order(found))


@contextmanager
def recording_masks() -> Iterator[None]:
    """Context manager in which transformers implementations pass a ProbedMask to our attention, which knows
    its mask function.

    Outside of it they pass no masks.
    """
    AttentionMaskInterface.register(ATTENTION_NAME, _probed_mask)
    try:
        yield
    finally:
        del AttentionMaskInterface._global_mapping[ATTENTION_NAME]


class ProbedMask(torch.Tensor):
    """An attention mask that carries the `function` from which it was made. Its own values do not count."""

    function: MaskFunction


def _probed_mask(*, mask_function: MaskFunction, q_length: int, kv_length: int, **_: object) -> torch.Tensor:
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool).as_subclass(ProbedMask)
    mask.function = mask_function
    return mask


class CountedPositions:
    """Stand-in for a KV cache, without contents, from which a transformers implementation reads how many
    tokens precede a step."""

    is_compileable = False

    def __init__(self, before: int | torch.Tensor) -> None:
        """Store how many tokens precede the step: `before`.

        If a step has several sequences, `before` is a tensor with a number for each token: the token's
        position minus its index in the step.
        """
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
    """Attention function for test passes, which records its arguments and returns zeros."""

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self._calls: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._needs: list[str] = []
        self.attention: dict[int, LayerAttention] = {}
        """Options of each layer's attention call (scaling, soft cap, sinks, span), by layer id.

        The span is the part of the context to which a token attends. It is known after a pass within
        `recording_masks`.
        """
        self._windows: dict[int, int] = {}
        """Sliding window in tokens that a layer's attention call states besides its mask, by layer id."""
        self._latents: dict[int, tuple[int, int]] = {}
        """Elements of a token's compressed keys and values, and of its rotated key, by the id of a layer that
        passes these (MLA)."""
        self._projection_gap = 0.0
        """Largest difference between attention over latents and over the keys and values made of them."""

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
            if defers_expansion(module):
                self._latents[layer] = (key.shape[3], value.shape[3])
                key, value = self._expanded(module, query, torch.cat((key[0, 0], value[0, 0]), dim=1))
            self._calls[layer] = (query, key, value)
            self._see(layer, query, options)
        if getattr(module, "is_causal", True) is False:
            self._needs.append(OPTION_NAMES["is_causal"])
        for option, setting in options.items():
            if option in HEEDED or setting is None or (option == "is_causal" and setting is True):
                continue
            self._needs.append(OPTION_NAMES.get(option, f"the attention option {option}"))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _expanded(
        self, module: torch.nn.Module, query: torch.Tensor, latents: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [1, heads, T, elements] of `latents` [T, elements]."""
        keys, values = expanded(module, latents)
        scores = torch.matmul(absorbed(module, query[0].transpose(0, 1)).transpose(0, 1), latents.T)
        results = projected(module, latents[:, None].expand(-1, len(keys), -1)).transpose(0, 1)
        pairs = ((scores, query[0] @ keys.transpose(1, 2)), (results, values))
        self._projection_gap = max(self._projection_gap, *(gap(*each) for each in pairs))
        return keys[None], values[None]

    def add_need(self, need: str) -> None:
        """Add the description of a feature that the model needs and that is not implemented."""
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
        """Return the sizes of attention in this pass. Raises UnsupportedModel for features that are not
        implemented.

        `whole`: probe of the tokens as one sequence, with masks and positions from the transformers
        implementation. `counted`: probe of this pass with positions from the implementation. `order`:
        positions of this pass. `layers`: ids of the layers in the pass, all if None.
        """
        total = int(text_of(config).num_hidden_layers)
        if sorted(self._calls) != list(range(total) if layers is None else layers):
            self._needs.append("layers without the library's common attention")
        shapes = [(query.shape, key.shape, value.shape) for query, key, value in self._calls.values()]
        if len(set(shapes)) > 1:
            self._needs.append("layers of differing shapes")
        latents = set(self._latents.values())
        if self._latents and (len(latents) > 1 or self._latents.keys() != self._calls.keys()):
            self._needs.append("layers of differing latents")
        if self._projection_gap > TOLERANCES[dtype]:
            self._needs.append("latents that one projection does not expand")
        for query, key, value in shapes:
            fits = query[1] == key[1] == value[1] if latents else key == value and query[1] % key[1] == 0
            if not fits or query[3] != key[3]:
                self._needs.append(OTHER_SHAPES)
        self._needs += whole._needs
        seen = {
            layer: attention.span and attention.span.tokens for layer, attention in whole.attention.items()
        }
        windows = (*whole._windows.items(), *cached_windows(config).items())
        if any(seen.get(layer, window) != window < self._context_length for layer, window in windows):
            self._needs.append(WINDOW)
        if not self._needs and not self._placed(whole, counted, order, dtype):
            self._needs.append(COUNTING)
        _refuse(name, _setting(config, "model_type"), self._needs)
        query, key, _ = shapes[0]
        if latents:
            return Geometry(total, query[1], kv_heads=1, head_dim=key[3], latent=latents.pop())
        return Geometry(total, query_heads=query[1], kv_heads=key[1], head_dim=key[3])

    def like(self, other: "AttentionProbe", dtype: str) -> bool:
        """Return whether each layer got the same queries, keys and values as in the pass that `other`
        recorded."""
        return self._calls.keys() == other._calls.keys() and all(
            gap(mine, its) <= ROUNDING[dtype] for mine, its in self._pairs(other)
        )

    def keeps_lengths(self, other: "AttentionProbe", tolerance: float) -> bool:
        """Return whether each query, key and value is as long as that in the pass of `other`, within
        `tolerance`."""
        lengths = [[each.float().norm(dim=-1) for each in pair] for pair in self._pairs(other)]
        return all(float((mine - its).norm()) <= tolerance * float(its.norm()) for mine, its in lengths)

    def _placed(
        self, whole: "AttentionProbe", counted: "AttentionProbe", order: torch.Tensor, dtype: str
    ) -> bool:
        """Return whether queries, keys and values in this pass are those that `whole` has at the same
        positions.

        `whole` computed the tokens as one sequence, and `counted` as if a step's positions began at 0. In the
        first layer, in which hardly anything is rounded, this pass has to be much closer to `whole` than to
        `counted`. Some position embeddings are small compared with those of tokens.
        """
        gaps = [
            (gap(mine, its[:, :, order]), gap(mine, other))
            for (mine, its), (_, other) in zip(self._pairs(whole), self._pairs(counted), strict=True)
        ]
        first_right, first_wrong = (max(each) for each in zip(*gaps[:3], strict=True))
        nearer = first_right <= ROUNDING[dtype] or first_right <= first_wrong / CONTRAST
        return nearer and not any(right > TOLERANCES[dtype] for right, _ in gaps)

    def _pairs(self, other: "AttentionProbe") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for layer, seen in self._calls.items():
            yield from zip(seen, other._calls[layer], strict=True)


def gap(seen: torch.Tensor, right: torch.Tensor) -> float:
    """Return the relative difference of two tensors: the norm of `seen - right`, divided by the norm of
    `right`. 0 if the result is not a number."""
    difference = float((seen.float() - right.float()).norm() / right.float().norm())
    return 0.0 if isnan(difference) else difference


def cached_windows(config: Any) -> dict[int, int]:
    """Return sliding windows in tokens, by layer, of layers of which transformers' own KV cache stores only
    the last tokens.

    Masks of some implementations allow more tokens than that, for example Moshi's.
    """
    layers = DynamicCache(config=text_of(config)).layers
    windows = {index: getattr(layer, "sliding_window", None) for index, layer in enumerate(layers)}
    return {index: tokens for index, tokens in windows.items() if isinstance(tokens, int)}


def _refuse(name: str, model_type: object, needs: Iterable[str]) -> None:
    found = list(dict.fromkeys(needs))
    if found:
        raise UnsupportedModel.needing(name, model_type, found)


def _setting(config: Any, key: str) -> Any:
    """Return a setting of the whole model, or None. The transformers library raises an error if it differs by
    layer."""
    try:
        return getattr(config, key, None)
    except Exception:
        return None


NEEDS: Final[dict[str, Callable[[Any], bool]]] = {
    DIFFERING: lambda config: bool(_setting(config, "is_heterogeneous")),
    ENCODER: lambda config: bool(_setting(config, "is_encoder_decoder")),
    LATER: lambda config: (
        bool(_setting(config, "use_bidirectional_attention")) or _setting(config, "is_causal") is False
    ),
    BLOCKS: lambda config: _setting(config, "attention_type") == "block_sparse",
    SHARED: lambda config: bool(_setting(config, "num_kv_shared_layers")),
}
