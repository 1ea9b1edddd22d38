"""Interfaces through which request and response code uses the served model."""

from collections.abc import Sequence
from typing import Protocol

from baton.api.requests.schemas import RecommendedSampling
from baton.api.text.tokenizer import Tokenizer


class ModelDefaults(Protocol):
    """Properties of the served model that are needed to check a request and to fill in its defaults."""

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
