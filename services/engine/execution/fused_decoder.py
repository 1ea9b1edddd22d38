"""Computation of models of the common decoder structure in few calls.

It computes what the transformers implementation does, in fused pieces over weights laid out for the device.
There is one product for queries, keys and values, and one for gate and up. Rotation is in place. Values that
all layers need are computed once a step. Residuals stay in float32 in any dtype, which takes a third off the
error of logits in bfloat16. It is used if `runner_selection` has found that it agrees with the
implementation.
"""

from typing import Any, Final

import torch
from torch.nn import functional

from baton.engine.execution.attention_span import LayerAttention
from baton.engine.execution.linear_layers import fused_linear
from baton.engine.execution.model_structure import LayerStructure, ModelStructure, Norm
from baton.engine.execution.paged_attention import PagedAttention

FEW_ROWS: Final = 64
"""Most rows of a step for which a CPU takes longer to launch the decoder's calls than to compute them."""


class RmsNorm:
    """RMS norm: x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, computed in float32.

    The result has the weight's dtype.
    """

    def __init__(self, norm: Norm) -> None:
        self._dtype = norm.weight.dtype
        self._weight = norm.weight.float()
        self._epsilon = norm.epsilon
        self._width = len(norm.weight)
        self._doubled = torch.cat((self._weight, self._weight))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._normed(rows.float()).to(self._dtype)

    def of_sum(self, rows: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """Add `more` [T, width] to `rows` [T, width] in place, in float32, and return the norm of the sum."""
        return self(rows.add_(more))

    def _normed(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() > FEW_ROWS * self._width or rows.device.type != "cpu":
            return functional.rms_norm(rows, (self._width,), self._weight, self._epsilon)
        # A row joined with its negation has the mean 0, so its layer norm is the RMS norm. On CPUs torch has
        # one kernel for a layer norm, and seven calls for an RMS norm.
        both = torch.cat((rows, -rows), dim=-1)
        normed = torch.layer_norm(both, (2 * self._width,), self._doubled, None, self._epsilon)
        return normed.narrow(-1, 0, self._width)


class Layer:
    """One decoder layer in fused form. It takes the weights out of `parts`, the layer's modules.

    `then`: the norm that follows this layer.
    """

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
        """Add the layer's result to the residuals `x` [T, hidden], float32.

        Returns `x` normalized by the norm that follows the layer. `normed`: `x` normalized by this layer's
        input norm.
        """
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
    """A whole model in fused form.

    It takes the weights out of `structure` layer by layer, so `structure` is empty afterwards.
    """

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
        """Return the logits [N, vocabulary] of a batch. Arguments as in `BatchedModel`.

        A CUDA graph can capture it: it never waits for the GPU, and makes the same calls whatever tensors
        contain. `capability_probes.py` refuses models whose rotation does otherwise.
        """
        embedded = functional.embedding(tokens[0], self.embedding)
        cos, sin = self._rotary(embedded, positions)
        cos, sin = cos[0, :, None], sin[0, :, None]
        # The first half of a rotation subtracts.
        sin = torch.cat((-sin[..., : self._half], sin[..., self._half :]), dim=-1)
        x = embedded.float()
        normed = self._first(x)
        for layer in self._layers:
            normed = layer(x, normed, cos, sin, step)
        return self._head(normed[keep])
