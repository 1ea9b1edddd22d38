"""Trials of tiny models of all types, or of these: python -m tests.vllm.model_sweep [TYPE …] [--rewrite]

Processes are forked from one that has imported vLLM, which takes ten seconds.
"""

import argparse
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from baton.vllm.environment import prepare_environment
from tests.models import recipes
from tests.models.comparison import Outcome, TrialVerdict
from tests.models.vllm_outcomes import VllmOutcomes
from tests.vllm.model_recipes import RELATIVES
from tests.vllm.model_trial import make_reference, try_engine
from tests.vllm.oracle import IN_ONE_PROCESS

PROCESSES: Final = 2
TRIAL_S: Final = 300.0
"""Most seconds of each process of a trial. It takes five on two cores that do nothing else."""
PRELOADED: Final = (
    "tests.vllm.model_trial",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.llama",
    "baton.vllm.loading",
)
VARIABLES: Final = {
    **IN_ONE_PROCESS,
    "TORCHDYNAMO_DISABLE": "1",  # it would compile the count of better tokens, in seconds
}


def all_types() -> list[str]:
    """Return every type of models of text that the installed transformers library knows, and others."""
    return [*recipes.causal_types(), *RELATIVES]


def sweep(kinds: Sequence[str], processes: int = PROCESSES) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome of each type, in order."""
    with ThreadPoolExecutor(processes) as threads:
        yield from zip(kinds, threads.map(outcome_of, kinds), strict=True)


def outcome_of(kind: str, trial: Callable[..., Outcome] = try_engine) -> Outcome:
    """Return the outcome of the type `kind`. `trial`: of Baton's engine."""
    folder = Path(tempfile.mkdtemp(prefix="baton-vllm-models-"))
    try:
        reference = call_in_process(make_reference, kind, folder / kind)
        if isinstance(reference, Outcome):
            return reference
        outcome: Outcome = call_in_process(trial, folder / kind, reference)
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def call_in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function` returns in a process of its own, or an Outcome if it ends without or is late."""
    os.environ.update(VARIABLES)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        if receiver.poll(TRIAL_S):
            return receiver.recv()
        return Outcome(TrialVerdict.BROKEN, f"{function.__name__} is not done after {TRIAL_S:.0f} s")
    except EOFError:
        process.join()
        return Outcome(TrialVerdict.BROKEN, f"{function.__name__} ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    from vllm.model_executor.models import registry

    gc.freeze()  # what was imported before the fork: collecting it takes seconds
    prepare_environment()
    # It would import vLLM anew, to look at the model's class, in fear of a GPU.
    vars(registry)["_run_in_subprocess"] = lambda look: look()
    sender.send(function(*arguments))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.model_sweep", description=__doc__)
    parser.add_argument("types", nargs="*", help="without, all of them")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--rewrite", action="store_true", help="record the outcomes for docs/models.md")
    args = parser.parse_args()
    outcomes: dict[str, Outcome] = {}
    for kind, outcome in sweep(args.types or all_types(), args.processes):
        outcomes[kind] = outcome
        sys.stdout.write(f"{kind:28} {outcome.verdict.value:12} {outcome.words}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(Counter(each.verdict.value for each in outcomes.values()))}\n")
    if args.rewrite:
        VllmOutcomes.read().replacing(outcomes, is_all=not args.types).write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
