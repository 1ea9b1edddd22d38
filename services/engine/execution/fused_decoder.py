"""How does a model of the common structure compute a step with few calls?

The model library's definition says what is computed; this says it again in fused pieces, over weights laid
out for the device: one product for queries, keys and values, one for gate and up, rotation in place, and
whatever all layers share made once a step. What the layers add up is kept in float32, whatever their dtype:
in bfloat16 that takes a third off the logits' error. It is used only where `proof.py` has seen both agree.
"""

from typing import Any, Final

import torch
from torch.nn import functional

from baton.engine.execution.attention_span import LayerAttention
from baton.engine.execution.linear_layers import fused_linear
from baton.engine.execution.model_structure import LayerStructure, ModelStructure, Norm
from baton.engine.execution.paged_attention import PagedAttention

FEW_ROWS: Final = 64
"""Up to here the number of calls counts, not what each of them computes."""


class RmsNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension: computed in float32, given in the
    weight's dtype."""

    def __init__(self, norm: Norm) -> None:
        self._dtype = norm.weight.dtype
        self._weight = norm.weight.float()
        self._epsilon = norm.epsilon
        self._width = len(norm.weight)
        self._doubled = torch.cat((self._weight, self._weight))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._normed(rows.float()).to(self._dtype)

    def of_sum(self, rows: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """Add `more` [T, width] to `rows`, of float32, in place, and give the norm of that."""
        return self(rows.add_(more))

    def _normed(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() > FEW_ROWS * self._width or rows.device.type != "cpu":
            return functional.rms_norm(rows, (self._width,), self._weight, self._epsilon)
        # Beside its negation a row has the mean 0, so that a layer norm is the RMS norm: torch has one kernel
        # for that on CPUs, and seven calls for this.
        both = torch.cat((rows, -rows), dim=-1)
        normed = torch.layer_norm(both, (2 * self._width,), self._doubled, None, self._epsilon)
        return normed.narrow(-1, 0, self._width)


class Layer:
    """One layer, and its weights: those of `parts` are not needed any more. `then`: the norm that follows."""

    def __init__(self, parts: LayerStructure, head_dim: int, then: Norm) -> None:
        self._index = parts.index
        self._head_dim = head_dim
        queries, keys, values = (linear.out_features // head_dim for linear in parts.projections)
        self._heads = queries, keys, values
        self._query_norm = None if parts.query_norm is None else RmsNorm(parts.query_norm)
        self._key_norm = None if parts.key_norm is None else RmsNorm(parts.key_norm)
        self._qkv = fused_linear(parts.projections)
        self._out = fused_linear([parts.out])
        self._attention = LayerAttention(parts.scaling)
        self._before_gate = RmsNorm(parts.before_gate)
        self._gate_and_up = fused_linear(parts.gate_and_up)
        self._width = parts.down.in_features
        self._down = fused_linear([parts.down])
        self._then = RmsNorm(then)

    def __call__(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: PagedAttention,
    ) -> torch.Tensor:
        """Add to the residuals `x` [T, hidden], of float32, of which `normed` is this layer's norm, what it
        computes; gives the norm that follows."""
        queries, keys, values = self._heads
        qkv = self._qkv(normed).view(len(x), -1, self._head_dim)
        query, rotated = qkv.narrow(1, 0, queries), qkv.narrow(1, 0, queries + keys)
        if self._query_norm is not None:
            query.copy_(self._query_norm(query))
        if self._key_norm is not None:
            key = qkv.narrow(1, queries, keys)
            key.copy_(self._key_norm(key))
        swapped = rotated.roll(self._head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        seen = step.attend(self._index, query, qkv.narrow(1, queries, keys + values), self._attention)
        normed = self._before_gate.of_sum(x, self._out(seen.flatten(1)))
        both = self._gate_and_up(normed)
        gate, up = both.narrow(1, 0, self._width), both.narrow(1, self._width, self._width)
        return self._then.of_sum(x, self._down(functional.silu(gate).mul_(up)))


class FusedDecoder:
    """A whole model. Takes its weights layer by layer: `structure` is empty afterwards."""

    def __init__(self, structure: ModelStructure, head_dim: int) -> None:
        self.embedding = structure.embedding
        self._rotary: Any = structure.rotary
        self._half = head_dim // 2
        norms = [*(parts.before_attention for parts in structure.layers), structure.norm]
        self._first = RmsNorm(norms[0])
        self._layers = []
        for parts, then in zip(structure.layers, norms[1:], strict=True):
            self._layers.append(Layer(parts, head_dim, then))
            for linear in parts.linears:
                del linear.weight, linear.bias
        self._head = fused_linear([structure.head])
        del structure.head.weight

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: PagedAttention
    ) -> torch.Tensor:
        """[N, vocabulary], as `Model.logits` gives them.

        On a GPU it waits for nothing and takes no decision by what tensors hold, so that it can be captured
        (`graphs.py`). Rotations that would are refused (`supported.py`).
        """
        embedded = functional.embedding(tokens[0], self.embedding)
        cos, sin = self._rotary(embedded, positions)
        cos, sin = cos[0, :, None], sin[0, :, None]
        # What turns the first half is subtracted.
        sin = torch.cat((-sin[..., : self._half], sin[..., self._half :]), dim=-1)
        x = embedded.float()
        normed = self._first(x)
        for layer in self._layers:
            normed = layer(x, normed, cos, sin, step)
        return self._head(normed[keep])
