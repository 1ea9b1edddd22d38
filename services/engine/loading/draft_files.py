"""Files of a draft model: their location, the quantization of its weights, and a check of its vocabulary."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from baton.engine.quantization.weight_quantization import WeightQuantization, weight_quantization
from baton.models.engine_features import missing_in_torch
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
    """Directory from which the draft model is loaded."""


def find_draft_model(files: DraftModelFiles, directory: Path) -> FoundModel:
    """Return the location of the draft model that `files` name. A GGUF file is converted the first time.

    `directory`: directory of the model for which it drafts. Raises StartupError if it is missing or has
    another vocabulary.
    """
    with draft_errors_named(files):
        source = resolve(files.model, missing=missing_in_torch)
        drafts = prepare(source, lambda line: log.info("preparing the draft model", step=line))
        check_vocabulary(drafts, directory)
    return FoundModel(source, drafts)


def draft_quantization(settings: WorkerSettings, source: ModelSource) -> WeightQuantization | None:
    """Return the quantization of the draft model, which is that of the larger model, or None.

    If the larger model keeps the quantized blocks of its GGUF file, a draft model without such a file is not
    quantized.
    """
    how = Quantize(settings.quantize)
    if how is Quantize.KEEP and source.kind is not ModelKind.GGUF:
        return None
    return weight_quantization(how, source, multiplied=settings.multiplies_codes)


@contextmanager
def draft_errors_named(files: DraftModelFiles) -> Iterator[None]:
    """Make StartupErrors within the context name the draft model's settings instead of the model's."""
    try:
        yield
    except StartupError as error:
        text = re.sub(r"^--model \S+: ", "", str(error)).replace("--kv-cache-memory", "--draft-memory")
        raise StartupError(f"--speculate model:{files.model}: {text}") from error


def check_vocabulary(drafts: Path, model: Path) -> None:
    """Raise StartupError unless each token id stands for the same token in both model directories."""
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
