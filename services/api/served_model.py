"""The served model as clients and requests see it, and the function that loads it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from baton.api.requests.sampling_defaults import differing, recommended
from baton.api.requests.schemas import RecommendedSampling
from baton.api.resuming.stream_identity import digest_of_texts
from baton.api.text.template_limits import ChatTemplateFailed
from baton.api.text.token_bound import TokenBound
from baton.api.text.tokenizer import PROCESSOR_TEMPLATE, Tokenizer, load_tokenizer
from baton.api.tools.format_detection import ModelFormats, model_formats
from baton.api.tools.formats.output_formats import AUTO
from baton.models.model_facts import CONFIG_FILE, ModelFacts, json_object
from baton.models.tokenizer_files import TokenizerUnusable
from baton.runtime.logging import Log
from baton.runtime.model_options import GenerationConfig

log = Log(__name__)

TEMPLATE: Final = "chat_template.jinja"
TOOLS_KNOWN: Final = "the chat template knows tools"
TOOLS_DESCRIBED: Final = "the chat template knows no tools: the system message describes them"
TOOLS_REFUSED: Final = "the chat template knows no tools: requests with some are refused"
LENGTH_BOUNDED: Final = "texts too long for the context are refused by their length, before tokenising"
LENGTH_UNBOUNDED: Final = (
    "texts too long for the context are refused by their tokens: their length bounds none"
)
AMONG_OTHERS: Final = ("tokenizer_config.json", PROCESSOR_TEMPLATE)
"""JSON files of a model directory that may hold the chat template in one of their fields."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the API serves: its names, tokenizer, default sampling and output formats."""

    name: str
    """Name by which clients request the model in the field `model`. A response has it if its request names no
    model."""
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    """End-of-sequence token ids. They end a choice, unless the request sets `ignore_eos`."""
    vocabulary: int
    """Number of token ids, which is the number of rows of the model's embedding."""
    recommended_sampling: RecommendedSampling = field(default_factory=RecommendedSampling)
    """Default sampling parameters, for requests that do not set them."""
    formats: ModelFormats = field(default_factory=ModelFormats)
    """Formats in which the model writes tool calls and reasoning."""
    aliases: tuple[str, ...] = ()
    """Further names by which clients may request the model."""
    fingerprint: str = ""
    """Fingerprint of the weights and of the configuration."""

    @property
    def digest(self) -> bytes:
        """Digest of the model and of what renders its answers: chat template, sampling defaults and output
        formats. A stream is only continued by routers with the same digest."""
        sampling, formats = self.recommended_sampling, sorted(self.formats.names.items())
        return digest_of_texts(
            self.fingerprint, self.name, self.vocabulary, self.tokenizer.chat.text, sampling, formats
        )

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def load_served_model(
    model_dir: Path,
    facts: ModelFacts,
    generation_config: GenerationConfig = GenerationConfig.AUTO,
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    *,
    describes_tools: bool = True,
    aliases: tuple[str, ...] = (),
) -> ServedModel:
    """Load the tokenizer of a safetensors directory and return the served model.

    `facts`: what was read from the model's configuration before. `generation_config`: source of the default
    sampling parameters. `tool_call_parser` and `reasoning_parser`: names of output formats, or AUTO.
    `describes_tools`: describe tools in the system message if the chat template does not support them.

    Logs the tokens of the tokenizer that the model lacks, because a text with one of them is refused. Logs
    the default sampling, how tools are written into prompts, and how tool calls and reasoning are parsed.
    Raises TokenizerUnusable, also for a chat template that does not compile, and ModelUnreadable.
    """
    recommended_sampling = (
        recommended(model_dir) if generation_config is GenerationConfig.AUTO else RecommendedSampling()
    )
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
    log_floor(tokenizer.floor)
    if differing(recommended_sampling):
        log.info(
            "tokens are drawn as the model recommends where a request does not say it; "
            "--generation-config none changes that",
            **differing(recommended_sampling),
        )
    model_type = str(json_object(model_dir / CONFIG_FILE).get("model_type", ""))
    formats = model_formats(
        tokenizer, model_type, tool_call_parser, reasoning_parser, describes_tools=describes_tools
    )
    _log_tools(tokenizer, formats, describes_tools=describes_tools)
    return ServedModel(
        name=facts.name,
        tokenizer=tokenizer,
        eos_token_ids=facts.eos_token_ids,
        vocabulary=facts.vocab_size,
        recommended_sampling=recommended_sampling,
        formats=formats,
        aliases=aliases,
        fingerprint=facts.fingerprint,
    )


def _log_tools(tokenizer: Tokenizer, formats: ModelFormats, *, describes_tools: bool) -> None:
    """Log how tools are written into prompts, and the formats of tool calls and reasoning."""
    without_tools = TOOLS_DESCRIBED if describes_tools else TOOLS_REFUSED
    log.info(TOOLS_KNOWN if tokenizer.chat.knows_tools else without_tools, **formats.names)


def log_floor(floor: TokenBound) -> None:
    """Log whether texts that cannot fit the context are refused by their length, before they are
    tokenised."""
    if floor.unknown_because:
        log.info(LENGTH_UNBOUNDED, because=floor.unknown_because)
    else:
        log.info(LENGTH_BOUNDED, bytes_per_token=floor.bytes_per_token)


def _template_file(model_dir: Path) -> Path:
    """Return the path of the file with the chat template, for an error message. If no file has one, return
    the model's directory."""
    if (model_dir / TEMPLATE).is_file():
        return model_dir / TEMPLATE
    files = map(model_dir.joinpath, AMONG_OTHERS)
    return next((each for each in files if "chat_template" in json_object(each)), model_dir)
