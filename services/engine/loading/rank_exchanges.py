"""Modules in which the ranks of a model exchange results: sums, gathers, and transfers between stages."""

from typing import Any, Final

import torch
from torch import nn
from torch.func import functional_call

from baton.engine.loading.rank_shard import RankLink
from baton.models.model_facts import UnsupportedModel

NEAR: Final = 1e-5
"""Relative and absolute tolerance for equality of an RMS norm's results, if the sum is computed in another
order."""


class RowParallelLinear(nn.Module):
    """Linear layer of which each rank has some input columns. The ranks' partial results are added up."""

    def __init__(self, linear: nn.Linear, link: RankLink) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._link = link

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._link.rank_group.sum(nn.functional.linear(hidden, self.weight))
        return out if self.bias is None else out + self.bias


class ParallelHead(nn.Module):
    """The model's head, of which each tensor-parallel rank has some rows. The first rank gets all logits."""

    def __init__(self, linear: nn.Linear, link: RankLink, each: int) -> None:
        """Take this rank's rows of `linear`. `each`: most rows of a rank. The last rank may have fewer."""
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._link = link
        self._each = each
        self._width = len(linear.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = nn.functional.linear(hidden, self.weight, self.bias)
        out = nn.functional.pad(out, (0, self._each - out.shape[-1]))
        return self._link.rank_group.gather(out)[..., : self._width]


class ParallelNorm(nn.Module):
    """An RMS norm over all heads of a token together, of which each rank has some."""

    def __init__(self, norm: nn.Module, link: RankLink, copies: int) -> None:
        """Take over the weight of `norm`, the transformers implementation's norm over all heads.

        `copies`: number of ranks that have the same heads. Raises ValueError if it is no RMS norm.
        """
        super().__init__()
        kind = f"a {type(norm).__name__}"
        if len(list(norm.parameters())) != 1:
            raise ValueError(kind)
        (self.weight,) = norm.parameters()
        self._link = link
        self._width = len(self.weight)
        self._copies = copies
        epsilons = (getattr(norm, name, None) for name in ("variance_epsilon", "eps"))
        self._epsilon = next((each for each in epsilons if isinstance(each, float)), 0.0)
        numbers = torch.Generator().manual_seed(1)
        weight, hidden = (torch.randn(self._width, generator=numbers) for _ in range(2))
        theirs = functional_call(norm, {"weight": weight}, (hidden,))
        if not torch.allclose(theirs, self._normed(hidden, hidden.square().sum(), weight), NEAR, NEAR):
            raise ValueError(kind)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        squares = hidden.float().square().sum(-1, keepdim=True)
        return self._normed(hidden, self._link.rank_group.sum(squares) / self._copies, self.weight)

    def _normed(self, hidden: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = hidden.float() * torch.rsqrt(squares / self._width + self._epsilon)
        return weight * wide.to(hidden.dtype)


class MissingEmbedding(nn.Module):
    """Placeholder of an embedding that is on another pipeline stage.

    In a step it returns NaN, so that a transformers implementation which uses it after its first layer
    computes NaN. While the link to other stages is cut it returns distinct numbers for each token, for
    checks.
    """

    none: torch.Tensor

    def __init__(self, like: nn.Embedding, link: RankLink) -> None:
        super().__init__()
        self._link = link
        self._width = like.embedding_dim
        self.register_buffer("none", torch.empty(0, dtype=like.weight.dtype), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """Empty tensor in place of the embedding's weight, because transformers implementations read the
        device of that weight."""
        return self.none

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not self._link.is_cut:
            return self.none.new_full((*ids.shape, self._width), torch.nan)
        waves = torch.arange(1, self._width + 1, device=ids.device)
        return torch.sin((ids[..., None] + 1) * waves).to(self.none.dtype)


class SkippedLayer(nn.Module):
    """Placeholder of a layer that is computed on another pipeline stage. Its attributes are those of the
    layer that it replaces."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return hidden_states


class SkippedTail(nn.Module):
    """Placeholder of a module that follows the last layer, on a pipeline stage without that module."""

    def __init__(self, name: str, last: nn.Module) -> None:
        """Register a hook on `last`, the stage's last layer, so that using this module before that layer
        raises an error.

        `name`: name of the model.
        """
        super().__init__()
        self._name = name
        self._passed = False
        last.register_forward_hook(self._pass)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._passed:
            raise UnsupportedModel(
                f"the model {self._name} cannot be served by several ranks: it needs before its first layer "
                "what comes behind its last one, too"
            )
        self._passed = False
        return hidden

    def _pass(self, *_: object) -> None:
        self._passed = True


def receive_input(layer: nn.Module, link: RankLink) -> None:
    """Make `layer` compute on the hidden states that the previous pipeline stage sends, instead of its
    input."""

    def received(_: object, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if given:
            return (link.rank_group.receive(given[0]), *given[1:]), named
        return given, {**named, "hidden_states": link.rank_group.receive(named["hidden_states"])}

    layer.register_forward_pre_hook(received, with_kwargs=True)


def sum_results(module: nn.Module, link: RankLink) -> None:
    """Make `module` return the sum of its results on all tensor-parallel ranks."""
    module.register_forward_hook(lambda _, __, out: link.rank_group.sum(out))


def divide_input(module: nn.Module, ranks: int) -> None:
    """Divide the input of `module` by the number of ranks, which all have the same, and whose results are
    added up."""
    module.register_forward_pre_hook(lambda _, given: (given[0] / ranks, *given[1:]))


def dispatch_experts(experts: Any, own: range, link: RankLink) -> None:
    """Make the module `experts` compute only this rank's experts, whose ids are `own`, and sum its results
    over ranks.

    For a token that is routed to an expert of another rank, the router's weight becomes 0, and the expert's
    id becomes one that the module skips.
    """

    def routed(
        _: object, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, chosen, weights = given
        others = (chosen < own.start) | (chosen >= own.stop)
        return hidden, (chosen - own.start).masked_fill(others, len(own)), weights.masked_fill(others, 0)

    experts.num_experts = len(own)
    experts._is_expert_parallel = True  # the library's own flag
    experts.register_forward_pre_hook(routed)
    sum_results(experts, link)
