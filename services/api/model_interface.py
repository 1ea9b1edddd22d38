"""Interfaces through which request and response code uses the served model."""

from collections.abc import Sequence
from typing import Protocol

from baton.api.requests.schemas import RecommendedSampling
from baton.api.text.tokenizer import Tokenizer


class ModelDefaults(Protocol):
    """Interface of the served model's names, limits and default values, by which requests are checked and
    completed."""

    @property
    def name(self) -> str: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def recommended_sampling(self) -> RecommendedSampling: ...


class Model(ModelDefaults, Protocol):
    """The served model with its names and its tokenizer. `served_model.ServedModel` implements this
    interface."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
