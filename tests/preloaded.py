"""What are the processes of tests forked from? From the product's own preloaded process, with more imported.

    python -m tests.preloaded SOCKET workers|bootstrap

The bootstrap runs without torch, and so is forked from a process of its own. What was forked runs `baton`
with the words that it was given, or, where the first is CALL, calls a function (`tests/forks.py` asks for
both).
"""

import base64
import pickle
import socket
import sys
from importlib import import_module
from typing import Final

from baton.api.text.tokenizer import keep_torch_out
from baton.launch.fork_server import serve

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
"""What tests call, beside what the product imports."""


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
            is_forked = serve(control, OF_BOOTSTRAP)
        else:
            _import_all()
            is_forked = serve(control)
    if is_forked and sys.argv[1:2] == [CALL]:
        _call(sys.argv[2])
    elif is_forked:
        from baton.cli.main import main

        __package__ = "baton.cli"  # in its usage a command is named by it
        main()
