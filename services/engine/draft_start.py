"""How does a draft model come up beside the model?"""

from pathlib import Path

from services.engine.draft_model import DraftModel
from services.engine.engine import TorchEngine, load_engine
from services.engine.kv_cache import NotEnoughMemory
from services.engine.memory import enough
from services.runtime.errors import StartupError
from services.runtime.logging import Log
from services.runtime.model_facts import read_model
from services.runtime.model_files import prepare, resolve
from services.runtime.tokenizer_files import reference_tokenizer
from services.runtime.worker_settings import DraftModelFiles, WorkerSettings

log = Log(__name__)


def start_draft_model(
    engine: TorchEngine, directory: Path, files: DraftModelFiles, settings: WorkerSettings, threads: int
) -> None:
    """Load the model of `files` and let it draft for `engine`, whose model lies in `directory`. On the rank
    that draws. Blocks for seconds. Raises StartupError: a model that is missing, is not supported or has
    another vocabulary, or too little memory."""
    source = resolve(files.model)
    drafts = prepare(source, lambda line: log.info("preparing the draft model", step=line))
    check_vocabulary(drafts, directory)
    try:
        with enough(f"the draft model {source.path}"):
            beside = load_engine(
                drafts,
                dtype=settings.dtype,
                device=engine.cache.device,
                page_tokens=settings.page_tokens,
                kv_cache_memory=files.kv_memory,
                threads=threads,
                compiled=settings.compiled_steps,
                flash_attention=settings.flash_attention,
            )
            beside.cache.populate()
            beside.warm_up()
    except NotEnoughMemory as error:
        text = str(error).replace("--kv-cache-memory", "--draft-memory")
        raise StartupError(f"the draft model {source.path}: {text}") from error
    engine.draft_with(DraftModel(beside))
    log.info("draft model ready", model=source.name, tokens=beside.cache.tokens, bytes=beside.cache.length)


def check_vocabulary(drafts: Path, model: Path) -> None:
    """Raises StartupError where a token's id is not that of the same token in both directories."""
    sizes = [read_model(each).vocab_size for each in (drafts, model)]
    if sizes[0] != sizes[1]:
        raise StartupError(
            f"the draft model {drafts} has {sizes[0]} tokens, and the model {model} has {sizes[1]}: both have"
            " to have the same vocabulary"
        )
    mine, other = ({id_: text for text, id_ in _vocabulary(each).items()} for each in (drafts, model))
    for id_ in sorted(mine.keys() | other.keys()):
        if mine.get(id_) != other.get(id_):
            raise StartupError(
                f"token {id_} of the draft model {drafts} is {mine.get(id_)!r}, and of the model {model}"
                f" {other.get(id_)!r}: both have to have the same vocabulary"
            )


def _vocabulary(directory: Path) -> dict[str, int]:
    known: dict[str, int] = reference_tokenizer(directory).backend_tokenizer.get_vocab(True)
    return known
