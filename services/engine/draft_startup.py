"""How does a draft model come up beside the model?"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from baton.engine.available_memory import enough
from baton.engine.quantization.weight_quantization import WeightQuantization, weight_quantization
from baton.engine.torch_engine import TorchEngine, load_engine
from baton.models.model_files import ModelKind, ModelSource, prepare, resolve
from baton.models.tokenizer_files import reference_tokenizer
from baton.runtime.errors import StartupError
from baton.runtime.logging import Log
from baton.runtime.model_options import Quantize
from baton.runtime.worker_settings import DraftModelFiles, WorkerSettings
from baton.sampling.draft_model import DraftModel

log = Log(__name__)


class FoundModel(NamedTuple):
    source: ModelSource
    directory: Path
    """To load it from."""


def find_draft_model(files: DraftModelFiles, directory: Path) -> FoundModel:
    """The model of `files`, which drafts for the one in `directory`. Converts a GGUF file the first time.
    Raises StartupError: it is missing, or has another vocabulary."""
    with _said_of(files):
        source = resolve(files.model)
        drafts = prepare(source, lambda line: log.info("preparing the draft model", step=line))
        check_vocabulary(drafts, directory)
    return FoundModel(source, drafts)


def start_draft_model(
    engine: TorchEngine, drafts: FoundModel, files: DraftModelFiles, settings: WorkerSettings, threads: int
) -> None:
    """Load `drafts`, its weights as codes where the model's are, and let it draft for `engine`. On the rank
    that draws. Blocks for seconds. Raises StartupError: a model that is not supported, or too little
    memory."""
    with _said_of(files), enough("it"):
        beside = load_engine(
            drafts.directory,
            coding=_coding(settings, drafts.source),
            dtype=settings.dtype,
            device=engine.cache.device,
            page_tokens=settings.page_tokens,
            kv_cache_memory=files.kv_memory,
            threads=threads,
            cuda_graphs=settings.replayed_rows,
            compiled=settings.compiled_steps,
            flash_attention=settings.flash_attention,
        )
        beside.cache.populate()
        beside.warm_up()
    engine.draft_with(DraftModel(beside, engine.vocab_size))
    log.info("draft model ready", model=files.model, tokens=beside.cache.tokens, bytes=beside.cache.length)


def _coding(settings: WorkerSettings, source: ModelSource) -> WeightQuantization | None:
    """As the model's. Where its file's blocks are kept, a draft model that has no file is as it is."""
    how = Quantize(settings.quantize)
    if how is Quantize.KEEP and source.kind is not ModelKind.GGUF:
        return None
    return weight_quantization(how, source, multiplied=settings.multiplies_codes)


@contextmanager
def _said_of(files: DraftModelFiles) -> Iterator[None]:
    """Errors name the settings of the draft model, where they would name the model's or none."""
    try:
        yield
    except StartupError as error:
        told = re.sub(r"^--model \S+: ", "", str(error)).replace("--kv-cache-memory", "--draft-memory")
        raise StartupError(f"--speculate model:{files.model}: {told}") from error


def check_vocabulary(drafts: Path, model: Path) -> None:
    """Raises StartupError where a token's id is not that of the same token in both directories."""
    mine, other = ({id_: text for text, id_ in _vocabulary(each).items()} for each in (drafts, model))
    for id_ in sorted(mine.keys() | other.keys()):
        if mine.get(id_) != other.get(id_):
            raise StartupError(
                f"its token {id_} is {mine.get(id_)!r}, and that of the model {model} {other.get(id_)!r}:"
                " both have to have the same vocabulary"
            )


def _vocabulary(directory: Path) -> dict[str, int]:
    known: dict[str, int] = reference_tokenizer(directory).backend_tokenizer.get_vocab(True)
    return known
