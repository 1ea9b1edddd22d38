"""Calls of a function in a process of its own, which has everything imported but the product.

A mutant changes the product's modules when they are imported. So other tests' processes (`tests/forks.py`)
are not forked from this one.
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
"""Modules imported once: those that take long and are no part of the product."""


class NoAnswer(Exception):
    """The function gave no answer. The text says why."""


def answer_of(function: Callable[..., Any], *arguments: object, limit_s: float) -> Any:
    """Return what the function returns. Arguments and result have to be picklable.

    The process is ended after `limit_s` seconds. Raises NoAnswer, also if the function raises.
    """
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
    """Return a folder for these processes' bytecode.

    The product is compiled once for all of them, and nothing is written beside its sources.
    """
    folder = tempfile.mkdtemp(prefix="baton-bytecode-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
