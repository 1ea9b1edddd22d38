"""Modules at which the ranks of a model exchange results or pass them on."""

from typing import Any, Final

import torch
from torch import nn
from torch.func import functional_call

from baton.engine.loading.rank_shard import RankLink
from baton.models.model_facts import UnsupportedModel

NEAR: Final = 1e-5
"""Relative difference that rounding may make to a norm that is computed in another order."""


class RowParallelLinear(nn.Module):
    """Columns of a linear layer whose input is divided as its weight is. Each rank has a part of every
    sum."""

    def __init__(self, linear: nn.Linear, link: RankLink) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._link = link

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._link.rank_group.sum(nn.functional.linear(hidden, self.weight))
        return out if self.bias is None else out + self.bias


class ParallelHead(nn.Module):
    """Rows of the last linear layer. The first tensor rank gets all results."""

    def __init__(self, linear: nn.Linear, link: RankLink, each: int) -> None:
        """`each`: most rows of a rank. The last rank may have fewer."""
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
    """An RMS norm over all heads of a token, of which each rank has some."""

    def __init__(self, norm: nn.Module, link: RankLink, copies: int) -> None:
        """`norm`: the definition's norm over all heads. `copies`: number of ranks that have the same heads.

        Raises ValueError for a norm of another kind.
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
    """Placeholder of an embedding that is on another stage.

    In a step it returns NaN, so that a definition which uses it after its first layer computes NaN. While the
    link to other stages is cut it returns distinct numbers for each token, for checks.
    """

    none: torch.Tensor

    def __init__(self, like: nn.Embedding, link: RankLink) -> None:
        super().__init__()
        self._link = link
        self._width = like.embedding_dim
        self.register_buffer("none", torch.empty(0, dtype=like.weight.dtype), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor: definitions read its device."""
        return self.none

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not self._link.is_cut:
            return self.none.new_full((*ids.shape, self._width), torch.nan)
        waves = torch.arange(1, self._width + 1, device=ids.device)
        return torch.sin((ids[..., None] + 1) * waves).to(self.none.dtype)


class SkippedLayer(nn.Module):
    """Placeholder of a layer that is on another stage. Its attributes are the layer's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return hidden_states


class SkippedTail(nn.Module):
    """Placeholder of a module behind the last layer that is on another stage."""

    def __init__(self, name: str, last: nn.Module) -> None:
        """`name`: of the model. `last`: the stage's last layer."""
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
    """Make `layer` compute what the previous stage sends, whatever its input is."""

    def received(_: object, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if given:
            return (link.rank_group.receive(given[0]), *given[1:]), named
        return given, {**named, "hidden_states": link.rank_group.receive(named["hidden_states"])}

    layer.register_forward_pre_hook(received, with_kwargs=True)


def sum_results(module: nn.Module, link: RankLink) -> None:
    """Make `module` return the sum of its results on all tensor ranks."""
    module.register_forward_hook(lambda _, __, out: link.rank_group.sum(out))


def dispatch_experts(experts: Any, own: range, link: RankLink) -> None:
    """Make `experts`, which are `own` of all, compute the tokens routed to them, and sum over ranks.

    Tokens routed to other experts get no weight, and the id of no expert.
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
