"""Which model is served, under which name, and what does intake have to know of it?"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.openai.chat_template import ChatTemplateFailed
from services.openai.drawing import differing, recommended
from services.openai.schemas import Drawing
from services.openai.tokenizer import OF_PROCESSOR, Tokenizer, load_tokenizer
from services.runtime.logging import Log
from services.runtime.model_facts import ModelFacts, json_object
from services.runtime.model_files import GenerationConfig
from services.runtime.tokenizer_files import TokenizerUnusable

log = Log(__name__)

TEMPLATE: Final = "chat_template.jinja"
AMONG_OTHERS: Final = ("tokenizer_config.json", OF_PROCESSOR)
"""Files in which a chat template may be beside other words."""


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
    drawing: Drawing = field(default_factory=Drawing)
    """Of what a request does not say."""


def load_served_model(
    model_dir: Path, facts: ModelFacts, generation_config: GenerationConfig = GenerationConfig.AUTO
) -> ServedModel:
    """The model in a safetensors directory, whose facts were read, with its tokenizer. `generation_config`:
    whose sampling counts where a request has none.

    Says which tokens of it the model lacks: a text with one of them is refused; and how tokens are drawn, if
    the model recommends it. Raises TokenizerUnusable, also for a chat template that does not compile, and
    ModelUnreadable.
    """
    drawing = recommended(model_dir) if generation_config is GenerationConfig.AUTO else Drawing()
    tokenizer = load_tokenizer(model_dir)
    try:
        tokenizer.check_chat()
    except ChatTemplateFailed as error:
        raise TokenizerUnusable(
            f"{_template_file(model_dir)}: the chat template does not compile: {error}"
        ) from error
    lacking = tokenizer.beyond(facts.vocab_size)
    if lacking:
        log.warning(
            "the tokenizer has tokens that the model lacks: a text with one of them is refused",
            tokens=len(lacking),
            first=lacking[0],
            vocabulary=facts.vocab_size,
        )
    if differing(drawing):
        log.info(
            "tokens are drawn as the model recommends where a request does not say it; "
            "--generation-config none changes that",
            **differing(drawing),
        )
    return ServedModel(
        name=facts.name,
        tokenizer=tokenizer,
        eos_token_ids=facts.eos_token_ids,
        vocabulary=facts.vocab_size,
        drawing=drawing,
    )


def _template_file(model_dir: Path) -> Path:
    """Where the chat template is."""
    if (model_dir / TEMPLATE).is_file():
        return model_dir / TEMPLATE
    files = map(model_dir.joinpath, AMONG_OTHERS)
    return next((each for each in files if "chat_template" in json_object(each)), model_dir)
