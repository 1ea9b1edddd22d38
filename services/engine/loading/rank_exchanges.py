"""What stands in a definition where ranks put together what each of them computes, or pass it on?"""

from typing import Any, Final

import torch
from torch import nn
from torch.func import functional_call

from baton.engine.loading.rank_shard import RankLink
from baton.models.model_facts import UnsupportedModel

NEAR: Final = 1e-5
"""How far rounding may take a norm from another way of computing it."""


class RowParallelLinear(nn.Module):
    """Columns of a linear layer whose input is cut as its weight is: each rank has a part of every sum."""

    def __init__(self, linear: nn.Linear, link: RankLink) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._link = link

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._link.team.sum(nn.functional.linear(hidden, self.weight))
        return out if self.bias is None else out + self.bias


class Head(nn.Module):
    """Rows of the last linear layer, of which the first tensor rank is to have everything that comes out."""

    def __init__(self, linear: nn.Linear, link: RankLink, each: int) -> None:
        """`each`: the most rows that a rank has; the last may have fewer."""
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._link = link
        self._each = each
        self._width = len(linear.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = nn.functional.linear(hidden, self.weight, self.bias)
        out = nn.functional.pad(out, (0, self._each - out.shape[-1]))
        return self._link.team.gather(out)[..., : self._width]


class ParallelNorm(nn.Module):
    """An RMS norm over all heads of a token, of which each rank has some."""

    def __init__(self, norm: nn.Module, link: RankLink, copies: int) -> None:
        """`norm`: as the definition has it, over all of them. `copies`: ranks that have the same heads.
        Raises ValueError for a norm of another kind."""
        super().__init__()
        kind = f"a {type(norm).__name__}"
        if len(list(norm.parameters())) != 1:
            raise ValueError(kind)
        (self.weight,) = norm.parameters()
        self._link = link
        self._width = len(self.weight)
        self._copies = copies
        told = (getattr(norm, name, None) for name in ("variance_epsilon", "eps"))
        self._epsilon = next((each for each in told if isinstance(each, float)), 0.0)
        numbers = torch.Generator().manual_seed(1)
        weight, hidden = (torch.randn(self._width, generator=numbers) for _ in range(2))
        theirs = functional_call(norm, {"weight": weight}, (hidden,))
        if not torch.allclose(theirs, self._normed(hidden, hidden.square().sum(), weight), NEAR, NEAR):
            raise ValueError(kind)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        squares = hidden.float().square().sum(-1, keepdim=True)
        return self._normed(hidden, self._link.team.sum(squares) / self._copies, self.weight)

    def _normed(self, hidden: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = hidden.float() * torch.rsqrt(squares / self._width + self._epsilon)
        return weight * wide.to(hidden.dtype)


class MissingEmbedding(nn.Module):
    """In the place of an embedding that another stage has. In a step it gives what is no number, so that a
    definition which looks at it behind its first layer computes none. While nothing is said to other stages
    it gives numbers of its own for each token, which are looked at in the place of theirs."""

    none: torch.Tensor

    def __init__(self, like: nn.Embedding, link: RankLink) -> None:
        super().__init__()
        self._link = link
        self._width = like.embedding_dim
        self.register_buffer("none", torch.empty(0, dtype=like.weight.dtype), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """Of no numbers: definitions ask it where it is."""
        return self.none

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not self._link.is_cut:
            return self.none.new_full((*ids.shape, self._width), torch.nan)
        waves = torch.arange(1, self._width + 1, device=ids.device)
        return torch.sin((ids[..., None] + 1) * waves).to(self.none.dtype)


class Elsewhere(nn.Module):
    """In the place of a layer that another stage has. What it is otherwise asked is the layer's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return hidden_states


class Later(nn.Module):
    """In the place of what comes behind the last layer, which another stage has."""

    def __init__(self, name: str, last: nn.Module) -> None:
        """`name`: of the model; `last`: the stage's last layer."""
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


def receive_before(layer: nn.Module, link: RankLink) -> None:
    """`layer` computes what the stage before sends, whatever it is given."""

    def received(_: object, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if given:
            return (link.team.receive(given[0]), *given[1:]), named
        return given, {**named, "hidden_states": link.team.receive(named["hidden_states"])}

    layer.register_forward_pre_hook(received, with_kwargs=True)


def sum_behind(module: nn.Module, link: RankLink) -> None:
    """What comes out of `module` is a part of a sum: ranks add it up."""
    module.register_forward_hook(lambda _, __, out: link.team.sum(out))


def dispatch(experts: Any, own: range, link: RankLink) -> None:
    """`experts`, which are `own` of all, compute what is meant for them, and ranks add it up. What is meant
    for others has no weight, and a number that none has."""

    def routed(
        _: object, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, chosen, weights = given
        others = (chosen < own.start) | (chosen >= own.stop)
        return hidden, (chosen - own.start).masked_fill(others, len(own)), weights.masked_fill(others, 0)

    experts.num_experts = len(own)
    experts._is_expert_parallel = True  # the library's own word for that
    experts.register_forward_pre_hook(routed)
    sum_behind(experts, link)
