"""Trials of a tiny model of every type of the model library."""

import re
import shutil
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import torch
from transformers.utils import logging as library_logging

from baton.engine.loading.capability_probes import refuse_by_configuration
from baton.models.engine_features import missing_in_torch
from baton.models.model_facts import UnsupportedModel
from baton.models.model_requirements import ONE_TEXT
from baton.runtime.errors import describe_error
from tests.engine.ranks.rank_processes import Crew
from tests.models import recipes
from tests.models.comparison import Outcome, TrialVerdict, why
from tests.models.trial import try_model

PROCESSES: Final = 2


def all_types() -> list[str]:
    return list(dict.fromkeys([*recipes.causal_types(), *recipes.container_types()]))


def sweep(kinds: Sequence[str], processes: int = PROCESSES) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome of each type, in order."""
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin) as pool:
        yield from zip(kinds, pool.map(outcome_of, kinds), strict=True)


def outcome_of(kind: str) -> Outcome:
    place = Path(tempfile.mkdtemp(prefix="baton-models-"))
    try:
        try:
            refused = refused_as_released(kind)
            if refused is not None:
                return refused
            directory = recipes.save(recipes.recipe(kind), place / kind)
        except ImportError as error:
            package = re.search(r"requires the (\w+) library", str(error))
            return Outcome(
                TrialVerdict.REFUSED, f"it needs {package[1] if package else error}, which Baton has not"
            )
        except Exception as error:
            return Outcome(TrialVerdict.UNTRIED, describe_error(error) or type(error).__name__)
        with closing(Crew()) as crew:
            return try_model(directory, crew)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in reversed(frames[-4:]))
        return Outcome(TrialVerdict.BROKEN, f"{describe_error(error)} ({where})")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def refused_as_released(kind: str) -> Outcome | None:
    """Return the outcome of a type that is refused by its released configuration, so that no model has to be
    made."""
    config = recipes.released(kind)
    missing = missing_in_torch(config.to_dict(), None)
    if ONE_TEXT in missing:
        return Outcome(TrialVerdict.REFUSED, f"it needs {ONE_TEXT}")
    try:
        refuse_by_configuration(kind, config, missing)
    except UnsupportedModel as refusal:
        return Outcome(TrialVerdict.REFUSED, why(str(refusal)))
    return None


def _begin() -> None:
    torch.set_num_threads(1)
    library_logging.set_verbosity(50)
