"""Check of a model's files, before a command imports or starts anything slow."""

import re
from collections.abc import Iterable

from baton.decode.settings import Speculation
from baton.launch.engine_table import ENGINES, choose_engine
from baton.models.engine_features import MissingFeatures, missing_in_all
from baton.models.model_files import ModelKind, resolve
from baton.models.model_refusals import refuse_without_tokenizer
from baton.runtime.errors import StartupError
from baton.runtime.model_options import LoadFormat
from baton.runtime.worker_settings import WorkerSettings


def check_models(
    model: str,
    load_format: str,
    drafts: Iterable[str] = (),
    *,
    needs_tokenizer: bool = False,
    may_lack_weights: bool = False,
    missing: MissingFeatures = missing_in_all,
) -> None:
    """Raise StartupError if the model `model`, or one of the draft models `drafts`, cannot be served.

    `needs_tokenizer`: whether requests come as text, so that a tokenizer is needed. `may_lack_weights`:
    accept a directory without weights. `missing`: features of models that the workers' engine lacks.
    """
    source = resolve(model, LoadFormat(load_format), missing, may_lack_weights=may_lack_weights)
    if needs_tokenizer and source.kind is ModelKind.DIRECTORY:
        refuse_without_tokenizer(source.path)
    for draft in drafts:
        try:
            resolve(draft, missing=missing)
        except StartupError as error:
            words = re.sub(r"^--model \S+: ", "", str(error))
            raise StartupError(f"--speculate model:{draft}: {words}") from error


def check_worker_models(settings: WorkerSettings) -> None:
    """Raise StartupError if the model or the draft model in a worker's settings cannot be served."""
    draft = settings.draft_model
    missing = ENGINES[choose_engine(settings.engine, settings.device)].missing
    drafts = () if draft is None else (draft.model,)
    check_models(settings.model, settings.load_format, drafts, missing=missing)


def draft_of(speculate: str) -> str:
    """Return the draft model in a value of `--speculate`, or an empty text if there is none."""
    return Speculation.parse(speculate).model if speculate else ""
