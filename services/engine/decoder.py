"""How does a model of the common anatomy compute a step with few calls?

The model library's definition says what is computed; this says it again in fused pieces, over weights laid
out for the device: one product for queries, keys and values, one for gate and up, rotation in place, and
whatever all layers share made once a step. Where weights may be held twice, a step of a few rows is computed
in float32. It is used only where `proof.py` has seen both agree.
"""

from typing import Any, Final

import torch
from torch.nn import functional

from services.engine.anatomy import Anatomy, LayerParts, Norm
from services.engine.attention import PagedStep
from services.engine.linears import FEW, linear_of, may_hold_twice

FEW_ROWS: Final = 64
"""Up to here the number of calls counts, not what each of them computes."""


class RmsNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension."""

    def __init__(self, norm: Norm) -> None:
        self._weight = norm.weight
        self._epsilon = norm.epsilon
        self._width = len(norm.weight)
        self._doubled = torch.cat((norm.weight, norm.weight)).float()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() > FEW_ROWS * self._width or rows.device.type != "cpu":
            return functional.rms_norm(rows, (self._width,), self._weight.to(rows.dtype), self._epsilon)
        # Beside its negation a row has the mean 0, so that a layer norm is the RMS norm: torch has one kernel
        # for that on CPUs, and seven calls for this.
        both = torch.cat((rows, -rows), dim=-1)
        normed = torch.layer_norm(both, (2 * self._width,), self._doubled, None, self._epsilon)
        return normed.narrow(-1, 0, self._width)


class Layer:
    """One layer, and its weights: those of `parts` are not needed any more."""

    def __init__(self, parts: LayerParts, head_dim: int, *, twice: bool) -> None:
        self._index = parts.index
        self._head_dim = head_dim
        queries, keys, _ = (linear.out_features // head_dim for linear in parts.projections)
        self._heads = queries, keys
        self._before_attention = RmsNorm(parts.before_attention)
        self._query_norm = None if parts.query_norm is None else RmsNorm(parts.query_norm)
        self._key_norm = None if parts.key_norm is None else RmsNorm(parts.key_norm)
        self._qkv = linear_of(parts.projections, twice=twice)
        self._out = linear_of([parts.out], twice=twice)
        self._scaling = parts.scaling
        self._before_gate = RmsNorm(parts.before_gate)
        self._gate_and_up = linear_of(parts.gate_and_up, twice=twice)
        self._width = parts.down.in_features
        self._down = linear_of([parts.down], twice=twice)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: PagedStep) -> None:
        """Add to the residuals `x` [T, hidden] what the layer computes."""
        queries, keys = self._heads
        qkv = self._qkv(self._before_attention(x)).view(len(x), -1, self._head_dim)
        query, rotated = qkv.narrow(1, 0, queries), qkv.narrow(1, 0, queries + keys)
        if self._query_norm is not None:
            query.copy_(self._query_norm(query))
        if self._key_norm is not None:
            key = qkv.narrow(1, queries, keys)
            key.copy_(self._key_norm(key))
        swapped = rotated.roll(self._head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        qkv = qkv.to(step.dtype)
        query, entries = qkv.narrow(1, 0, queries), qkv.narrow(1, queries, 2 * keys)
        seen = step.look(self._index, query, entries, self._scaling)
        x.add_(self._out(seen.flatten(1).to(x.dtype)))
        both = self._gate_and_up(self._before_gate(x))
        gate, up = both.narrow(1, 0, self._width), both.narrow(1, self._width, self._width)
        x.add_(self._down(functional.silu(gate).mul_(up)))


class Decoder:
    """A whole model. Takes its weights layer by layer: `anatomy` is empty afterwards. `twice`: where they can
    be held in half precision too, for steps of a few rows, they are."""

    def __init__(self, anatomy: Anatomy, head_dim: int, *, twice: bool = False) -> None:
        linears = [each for parts in anatomy.layers for each in parts.linears]
        self.twice = twice and all(may_hold_twice(each.weight) for each in (*linears, anatomy.head))
        self._embedding = anatomy.embedding
        self._rotary: Any = anatomy.rotary
        self._norm = RmsNorm(anatomy.norm)
        self._half = head_dim // 2
        self._layers = []
        for parts in anatomy.layers:
            self._layers.append(Layer(parts, head_dim, twice=self.twice))
            for linear in parts.linears:
                del linear.weight, linear.bias
        self._head = linear_of([anatomy.head], twice=self.twice)
        del anatomy.head.weight

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: PagedStep
    ) -> torch.Tensor:
        """[N, vocabulary], as `Model.logits` gives them; in float32 where the step was computed so.

        On a GPU it waits for nothing and takes no decision by what tensors hold, so that it can be captured
        (`graphs.py`). Rotations that would are refused (`supported.py`).
        """
        x = functional.embedding(tokens[0], self._embedding)
        if self.twice and len(x) <= FEW:
            x = x.float()
        cos, sin = self._rotary(x, positions)
        cos, sin = cos[0, :, None], sin[0, :, None]
        # What turns the first half is subtracted.
        sin = torch.cat((-sin[..., : self._half], sin[..., self._half :]), dim=-1)
        for layer in self._layers:
            layer(x, cos, sin, step)
        return self._head(self._norm(x[keep]))
