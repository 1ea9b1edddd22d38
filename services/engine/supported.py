"""Is this a model whose attention we compute as its authors meant it?

Two looks. `refuse_by_configuration` reads what the model says of itself, before any weight is loaded.
`Probe` stands in for the attention during one small forward pass and sees what each layer really asks
for: a model that asks for something not known here is refused, so that nothing wrong is ever computed.

A look has to come out differently in the wrong case (`probe-can-fail`). So the pass has what steps have, a
later chunk of one sequence and behind it the beginning of another, and is held against one in which the
definition counts the positions of a single sequence itself. A definition that counts a step's tokens from 0,
or that lets a token see its neighbours outside its attention, gives other queries, keys and values there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Final

import torch

from services.engine.attention import MASK
from services.runtime.model_facts import UnsupportedModel

WITHOUT_EFFECT: Final = frozenset(
    {"scaling", "dropout", "position_ids", "position_embeddings", "cache_position", "use_cache"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
)
"""Options of an attention call that are heeded (scaling) or change nothing when tokens are drawn."""
OPTION_NAMES: Final = {
    "sliding_window": "sliding-window attention",
    "softcap": "a soft cap on attention logits",
    "s_aux": "attention sinks",
    MASK: "an attention mask of its own",
    "is_causal": "attention to later tokens",
}
SLIDING: Final = "sliding_attention"
COUNTING: Final = "positions that it counts by itself, or tokens that see others outside its attention"
TOLERANCES: Final = {"float32": 1e-3, "bfloat16": 0.1}
"""Of what a layer sees twice, how long the difference may be, as a share of its length."""
ROUNDING: Final = {"float32": 1e-5, "bfloat16": 0.004}
"""How much of it may be rounding in the first layer."""
CONTRAST: Final = 4
"""So many times farther the first layer has to be from what a wrong place gives."""
PROBED: Final = 8
"""Tokens of the small pass."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a model's keys and values, the same in each of its layers."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int


def places(context_length: int) -> torch.Tensor:
    """The positions of the small pass: a later chunk, and behind it a beginning. None is where it would be
    counted from 0."""
    count = min(PROBED, context_length)
    return torch.arange(count).roll(count // 2)


def refuse_by_configuration(name: str, config: Any, context_length: int, known: Sequence[str] = ()) -> None:
    """Raise UnsupportedModel, with all that is missing, if the library's `config` asks for it. `known`: what
    was found to be missing before."""
    found = [*known, *(what for what, asks in NEEDS.items() if asks(config))]
    layers = {str(kind) for kind in _told(config, "layer_types") or (SLIDING,)} - {"full_attention"}
    if not _told(config, "is_encoder_decoder"):
        if not _window_is_active(config, context_length):
            layers.discard(SLIDING)
        found += [OTHER_LAYERS.get(kind, f"layers of type {kind}") for kind in sorted(layers)]
    _refuse(name, _told(config, "model_type"), found)


class Probe:
    """An attention that notes what it is asked for, and answers with zeros."""

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self._calls: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._needs: list[str] = []

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
        if getattr(module, "is_causal", True) is False:
            self._needs.append(OPTION_NAMES["is_causal"])
        for option, asked in options.items():
            if option in WITHOUT_EFFECT or asked is None or (option == "is_causal" and asked is True):
                continue
            if option == "sliding_window" and not _narrow(asked, self._context_length):
                continue
            self._needs.append(OPTION_NAMES.get(option, f"the attention option {option}"))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def verdict(
        self,
        whole: "Probe",
        counted: "Probe",
        order: torch.Tensor,
        dtype: str,
        name: str,
        config: Any,
        layers: Sequence[int] | None = None,
    ) -> Geometry:
        """What was seen in a forward pass of `layers` (of all, if not said), in numbers of `dtype`, of tokens
        at the positions `order`. `whole`: saw them as one sequence, whose positions the definition counted.
        `counted`: saw them as here, but for that the definition counted. Raises UnsupportedModel."""
        total = int(config.num_hidden_layers)
        if sorted(self._calls) != list(range(total) if layers is None else layers):
            self._needs.append("layers without the library's common attention")
        shapes = [(query.shape, key.shape, value.shape) for query, key, value in self._calls.values()]
        if len(set(shapes)) > 1:
            self._needs.append("layers of differing shapes")
        for query, key, value in shapes:
            if key != value or query[3] != key[3] or query[1] % key[1]:
                self._needs.append("keys and values of differing shapes")
        if not self._needs and not self._placed(whole, counted, order, dtype):
            self._needs.append(COUNTING)
        _refuse(name, _told(config, "model_type"), self._needs)
        query, key, _ = shapes[0]
        return Geometry(total, query_heads=query[1], kv_heads=key[1], head_dim=key[3])

    def turned(self, other: "Probe", tolerance: float) -> bool:
        """Whether each query, key and value is as long as the one that `other` saw in its place."""
        lengths = [[each.float().norm(dim=-1) for each in pair] for pair in self._beside(other)]
        return all(float((mine - its).norm()) <= tolerance * float(its.norm()) for mine, its in lengths)

    def _placed(self, whole: "Probe", counted: "Probe", order: torch.Tensor, dtype: str) -> bool:
        """Whether each layer sees a token as it is seen at its place in `whole`. The first, in which hardly
        anything is rounded, has to be much nearer to that than to what is seen where it is `counted`: some
        embeddings of positions are small beside those of tokens."""
        gaps = [
            (_gap(mine, its[:, :, order]), _gap(mine, other))
            for (mine, its), (_, other) in zip(self._beside(whole), self._beside(counted), strict=True)
        ]
        first_right, first_wrong = (max(each) for each in zip(*gaps[:3], strict=True))
        nearer = first_right <= ROUNDING[dtype] or first_right <= first_wrong / CONTRAST
        return nearer and not any(right > TOLERANCES[dtype] for right, _ in gaps)

    def _beside(self, other: "Probe") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for layer, seen in self._calls.items():
            yield from zip(seen, other._calls[layer], strict=True)


def _gap(seen: torch.Tensor, right: torch.Tensor) -> float:
    """How far `seen` is from `right`, as a share of that; 0 where a number is none."""
    gap = float((seen.float() - right.float()).norm() / right.float().norm())
    return 0.0 if isnan(gap) else gap


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


def _window_is_active(config: Any, context_length: int) -> bool:
    """Whether a token that is within the context can lie outside the window. That it is not used counts where
    the library knows the word: elsewhere it is a key that its definition passes over."""
    if _told(config, "use_sliding_window") is False and hasattr(type(config), "use_sliding_window"):
        return False
    window = _told(config, "sliding_window")
    return isinstance(window, int) and _narrow(window, context_length)


def _narrow(window: Any, context_length: int) -> bool:
    """Whether a window that is used can be shorter than a sequence."""
    return not isinstance(window, int) or window < context_length


OTHER_LAYERS: Final = {
    SLIDING: OPTION_NAMES["sliding_window"],
    "chunked_attention": "attention in chunks",
    "linear_attention": "linear-attention or state-space (Mamba) layers",
    "hybrid": "layers of attention and of state space (Mamba)",
    "conv": "convolution layers",
}

NEEDS: Final[dict[str, Callable[[Any], bool]]] = {
    "layers that differ from each other": lambda config: bool(_told(config, "is_heterogeneous")),
    "an encoder": lambda config: bool(_told(config, "is_encoder_decoder")),
    "more than text": lambda config: config.get_text_config() is not config,
    "quantised weights": lambda config: _told(config, "quantization_config") is not None,
    "multi-head latent attention (MLA)": lambda config: bool(_told(config, "kv_lora_rank")),
    OPTION_NAMES["softcap"]: lambda config: bool(_told(config, "attn_logit_softcapping")),
    OPTION_NAMES["is_causal"]: lambda config: (
        bool(_told(config, "use_bidirectional_attention")) or _told(config, "is_causal") is False
    ),
    "keys and values shared between layers": lambda config: bool(_told(config, "num_kv_shared_layers")),
}
