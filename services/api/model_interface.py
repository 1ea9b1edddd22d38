"""What requests and answers need of the served model."""

from collections.abc import Sequence
from typing import Protocol

from baton.api.requests.schemas import RecommendedSampling
from baton.api.text.tokenizer import Tokenizer


class ModelDefaults(Protocol):
    """What requests take from the served model."""

    @property
    def name(self) -> str: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def recommended_sampling(self) -> RecommendedSampling: ...


class Model(ModelDefaults, Protocol):
    """The served model, as `served_model.ServedModel` has it."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
