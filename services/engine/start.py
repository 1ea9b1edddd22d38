"""How does a worker's engine come up?"""

from services.engine.engine import Engine, load_engine
from services.runtime.logging import Log
from services.runtime.model_files import prepare, resolve
from services.runtime.worker_settings import WorkerSettings

log = Log(__name__)


def start_engine(settings: WorkerSettings, threads: int) -> Engine:
    """Find, prepare and load the model, reserve its KV cache, and run it once. Blocks for seconds.

    Raises StartupError for a missing or unsupported model, or too little memory.
    """
    directory = prepare(resolve(settings.model), lambda line: log.info("preparing the model", step=line))
    engine = load_engine(
        directory,
        dtype=settings.dtype,
        device=settings.device,
        page_tokens=settings.page_tokens,
        kv_cache_memory=settings.kv_cache_memory,
        threads=threads,
    )
    engine.warm_up()
    tokens = engine.cache.pages * engine.layout.page_tokens
    log.info("engine ready", tokens=tokens, dtype=engine.layout.dtype, device=engine.cache.device)
    return engine
