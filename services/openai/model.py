"""Which model is served, under which name, and what does intake have to know of it?"""

from dataclasses import dataclass
from pathlib import Path

from services.openai.tokenizer import Tokenizer, load_tokenizer
from services.runtime.model_facts import ModelFacts


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as clients see it."""

    name: str
    """What clients write into `model`."""
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    """Ids that end a sequence unless `ignore_eos`."""
    vocabulary: int
    """Token ids are below this: the rows of the model's embedding."""


def load_served_model(model_dir: Path, facts: ModelFacts) -> ServedModel:
    """The model in a safetensors directory, whose facts were read, with its tokenizer.

    Raises TokenizerUnusable.
    """
    return ServedModel(
        name=facts.name,
        tokenizer=load_tokenizer(model_dir),
        eos_token_ids=facts.eos_token_ids,
        vocabulary=facts.vocab_size,
    )
