"""How does a function run in a process of its own, which finds everything imported but the product?

A mutant changes the product's modules as they are imported, so this is not what the processes of other tests
are forked from (`tests/forks.py`).
"""

import atexit
import gc
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, Final

PRELOADED: Final = [
    "fastapi",
    "google.protobuf.message",
    "grpc.aio",
    "grpc_health.v1.health",
    "grpc_reflection.v1alpha.reflection",
    "httpx",
    "hypothesis",
    "llguidance",
    "prometheus_client",
    "pytest",
    "pytest_asyncio",
    "torch",
    "transformers.modeling_utils",
    "uvicorn.main",
    "xdist.plugin",
]
"""Imported once, for all: what takes long and is none of the product."""


class NoAnswer(Exception):
    """The text says why."""


def answer_of(function: Callable[..., Any], *arguments: object, limit_s: float) -> Any:
    """What the function returns, both of which can be pickled. It is ended after `limit_s` seconds. Raises
    NoAnswer, too where the function raises."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(function, arguments, _bytecode(), there), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(limit_s):
            raise NoAnswer(f"no answer within {limit_s:g} s")
        answer, problem = here.recv()
    except EOFError:
        process.join()
        raise NoAnswer(f"its process ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        here.close()
    if problem:
        raise NoAnswer(problem)
    return answer


def _answer(
    function: Callable[..., Any], arguments: tuple[object, ...], bytecode: str, there: Connection
) -> None:
    gc.freeze()  # what was imported is kept: to look through it, time and again, takes as long as a test
    sys.pycache_prefix, sys.dont_write_bytecode = bytecode, False
    try:
        there.send((function(*arguments), ""))
    except Exception as error:
        there.send((None, f"{type(error).__name__}: {error}"))


@cache
def _bytecode() -> str:
    """A folder in which these processes keep what they compile: the product is compiled once for all, and
    nothing is written beside it."""
    folder = tempfile.mkdtemp(prefix="baton-bytecode-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
