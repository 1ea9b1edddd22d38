"""vLLM's environment variables, its logger, and its replacements of globals, before vLLM is imported."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from baton.runtime.logging import Log

log = Log(__name__)

VARIABLES: Final = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""Variables that vLLM reads. The first model runner has logits and hidden states at the end of a step."""


class LogHandler(logging.Handler):
    """Handler of vLLM's log records: they become log lines of this process, damaged ones too."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit the message
            text = str(record.msg)
        write = log.error if record.levelno >= logging.ERROR else log.warning
        write("vLLM reports", logger=record.name, text=text)


def prepare_environment() -> None:
    """Set vLLM's variables, and send its warnings to this process's log. Before vLLM is imported."""
    os.environ.update(VARIABLES)
    logger = logging.getLogger("vllm")
    logger.handlers = [LogHandler()]
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


@contextmanager
def restoring_globals() -> Iterator[None]:
    """Context behind which `torch.set_num_threads` and LD_PRELOAD, which vLLM replaces, are as before."""
    set_num_threads, preloaded = torch.set_num_threads, os.environ.get("LD_PRELOAD")
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        os.environ.pop("LD_PRELOAD", None)
        if preloaded is not None:
            os.environ["LD_PRELOAD"] = preloaded
