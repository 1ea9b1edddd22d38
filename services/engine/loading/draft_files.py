"""How does a draft model come up beside the model?"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from baton.engine.quantization.weight_quantization import WeightQuantization, weight_quantization
from baton.models.model_files import ModelKind, ModelSource, prepare, resolve
from baton.models.tokenizer_files import reference_tokenizer
from baton.runtime.errors import StartupError
from baton.runtime.logging import Log
from baton.runtime.model_options import Quantize
from baton.runtime.worker_settings import DraftModelFiles, WorkerSettings

log = Log(__name__)


class FoundModel(NamedTuple):
    source: ModelSource
    directory: Path
    """To load it from."""


def find_draft_model(files: DraftModelFiles, directory: Path) -> FoundModel:
    """The model of `files`, which drafts for the one in `directory`. Converts a GGUF file the first time.
    Raises StartupError: it is missing, or has another vocabulary."""
    with draft_errors_named(files):
        source = resolve(files.model)
        drafts = prepare(source, lambda line: log.info("preparing the draft model", step=line))
        check_vocabulary(drafts, directory)
    return FoundModel(source, drafts)


def draft_quantization(settings: WorkerSettings, source: ModelSource) -> WeightQuantization | None:
    """As the model's. Where its file's blocks are kept, a draft model that has no file is as it is."""
    how = Quantize(settings.quantize)
    if how is Quantize.KEEP and source.kind is not ModelKind.GGUF:
        return None
    return weight_quantization(how, source, multiplied=settings.multiplies_codes)


@contextmanager
def draft_errors_named(files: DraftModelFiles) -> Iterator[None]:
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
