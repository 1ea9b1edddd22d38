"""Structure of a model's modules that our own executions can compute, found in the transformers
implementation.

An implementation is accepted for the modules of which it consists, not for its name: RMS norms before
attention and before a gated SiLU product, rotated queries and keys, nothing else. The code that these modules
run is not examined here. `runner_selection` compares results.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers.activations import ACT2FN

from baton.engine.execution.attention_span import LayerAttention

MODEL: Final = {"embed_tokens", "layers", "norm", "rotary_emb"}
TEXT: Final = "language_model"
"""Attribute name of the language model in transformers' multimodal models, whose other parts are dropped."""
LAYER: Final = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION: Final = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS: Final = {"q_norm", "k_norm"}
GATED: Final = {"gate_proj", "up_proj", "down_proj", "act_fn"}
FACTORS: Final = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")
CAP: Final = "final_logit_softcapping"
"""Name of a configuration value that bounds logits.

Some transformers implementations apply it, and the values in FACTORS, between their modules. In bfloat16 a
comparison of results would not notice a factor near 1.
"""
ROTATION_TOLERANCES: Final = {"float32": 1e-4, "bfloat16": 0.02}
"""Largest accepted relative change of a query's or key's length by a rotation, by number format."""
ROTATED_TOKENS: Final = 8
"""Number of tokens for which lengths of queries and keys are compared before and after rotation."""


class UnknownStructure(Exception):
    """A model's transformers implementation has modules that our own executions cannot compute. The message
    names the
    first.
    """


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class LayerStructure:
    index: int
    before_attention: Norm
    query_norm: Norm | None
    key_norm: Norm | None
    projections: list[nn.Linear]
    """Linear layers that compute queries, keys and values, in this order."""
    out: nn.Linear
    scaling: float
    before_gate: Norm
    gate_and_up: list[nn.Linear]
    down: nn.Linear

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return (*self.projections, self.out, *self.gate_and_up, self.down)


@dataclass(frozen=True, slots=True)
class ModelStructure:
    """The modules and weights of a whole model that our own executions compute."""

    embedding: torch.Tensor
    rotary: Any
    layers: list[LayerStructure]
    norm: Norm
    head: nn.Linear

    @property
    def linears(self) -> list[nn.Linear]:
        return [*(linear for each in self.layers for linear in each.linears), self.head]


def find_structure(module: Any, head_dim: int, attention: Iterable[LayerAttention]) -> ModelStructure:
    """Return the modules and weights of the transformers implementation `module` for our own executions.

    `head_dim`: width of its attention heads. `attention`: attention options of its layers. Raises
    UnknownStructure.
    """
    if not all(each.is_plain for each in attention):
        raise UnknownStructure("scores that are bounded or go to sinks")
    for name in (*FACTORS, CAP):
        value = getattr(module.config.get_text_config(), name, None)
        if value and (value != 1 or name == CAP):
            raise UnknownStructure(f"a {name} of {value}")
    base = getattr(module, "model", None)
    if not isinstance(base, nn.Module) or _children(module) != {"model", "lm_head"}:
        raise UnknownStructure(f"a model of {_listed(_children(module))}")
    if _children(base) == {TEXT}:
        base = getattr(base, TEXT)
    _consists("a model", base, MODEL)
    if type(base.embed_tokens) is not nn.Embedding:
        raise UnknownStructure(f"an embedding that is a {type(base.embed_tokens).__name__}")
    return ModelStructure(
        base.embed_tokens.weight.data,
        base.rotary_emb,
        [_layer(index, layer, head_dim) for index, layer in enumerate(base.layers)],  # type: ignore[arg-type]
        _norm(base.norm),
        _linear(module, "lm_head"),
    )


def _layer(index: int, layer: Any, head_dim: int) -> LayerStructure:
    _consists("a layer", layer, LAYER)
    attention, gated = layer.self_attn, layer.mlp
    normed = HEAD_NORMS & _children(attention)
    _consists("an attention", attention, ATTENTION | normed)
    _consists("a feed-forward part", gated, GATED)
    if type(gated.act_fn) not in (nn.SiLU, type(ACT2FN["silu"])):
        raise UnknownStructure(f"a gate of {type(gated.act_fn).__name__}")
    norms = {name: _norm(getattr(attention, name)) for name in normed}
    if any(norm.weight.shape != (head_dim,) for norm in norms.values()):
        raise UnknownStructure("norms over several heads at once")
    return LayerStructure(
        index,
        _norm(layer.input_layernorm),
        norms.get("q_norm"),
        norms.get("k_norm"),
        [_linear(attention, name) for name in ("q_proj", "k_proj", "v_proj")],
        _linear(attention, "o_proj"),
        float(getattr(attention, "scaling", head_dim**-0.5)),
        _norm(layer.post_attention_layernorm),
        [_linear(gated, name) for name in ("gate_proj", "up_proj")],
        _linear(gated, "down_proj"),
    )


def _norm(module: Any) -> Norm:
    epsilon = getattr(module, "variance_epsilon", None)
    if not isinstance(epsilon, float) or [name for name, _ in module.named_parameters()] != ["weight"]:
        raise UnknownStructure(f"a norm that is a {type(module).__name__}")
    return Norm(module.weight.data, epsilon)


def _linear(parent: Any, name: str) -> nn.Linear:
    child = getattr(parent, name)
    if type(child) is not nn.Linear:
        raise UnknownStructure(f"a {name} that is a {type(child).__name__}")
    return child


def _consists(what: str, module: Any, parts: set[str]) -> None:
    if _children(module) != parts:
        raise UnknownStructure(f"{what} of {_listed(_children(module))}")


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
