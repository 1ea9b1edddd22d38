"""Process that tests fork from: the product's fork server, with more imported.

    python -m tests.preloaded SOCKET workers|bootstrap

The bootstrap runs without torch, and so is forked from a process of its own. A forked process runs `baton`
with its words. If the first word is CALL it calls a function instead (`tests/forks.py` requests both).
"""

import base64
import pickle
import socket
import sys
from importlib import import_module
from typing import Final

from baton.api.text.tokenizer import keep_torch_out
from baton.cli import main as command
from baton.launch.fork_server import serve_forks

CALL: Final = "call"
BOOTSTRAP: Final = "bootstrap"
WORKERS: Final = "workers"
OF_BOOTSTRAP: Final = (
    "baton.bootstrap.wiring",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
)
CALLED: Final = (
    "tests.engine.ranks.rank_processes",
    "tests.parallel.rank_process",
    "tests.process.actors",
    "tests.process.hooked_rank",
    "tests.transfer.puppet",
)
"""Modules that tests call, besides those of the product."""


def _import_all() -> None:
    from baton.transfer.nixl_library import Library

    Library()  # it takes seconds to load; no agent is made
    for each in CALLED:
        import_module(each)


def _call(packed: str) -> None:
    function, arguments = pickle.loads(base64.b64decode(packed))
    function(*arguments)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        if sys.argv[2] == BOOTSTRAP:
            keep_torch_out()
            is_forked = serve_forks(control, command.__file__, OF_BOOTSTRAP)
        else:
            _import_all()
            is_forked = serve_forks(control, command.__file__)
    if is_forked and sys.argv[1:2] == [CALL]:
        _call(sys.argv[2])
    elif is_forked:
        __package__ = "baton.cli"  # in its usage a command is named by it
        command.main()
