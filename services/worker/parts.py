"""Of what are the turns of every rank made, whatever its worker's role?"""

from dataclasses import dataclass

from services.runtime.clock import Clock
from services.wire.model_bounds import ModelBounds
from services.worker.folds import Folds
from services.worker.mailbox import Mailbox
from services.worker.reporter import Reporter
from services.worker.stepper import Stepper


@dataclass(frozen=True, slots=True)
class RankParts:
    bounds: ModelBounds
    stepper: Stepper
    folds: Folds
    """With a shelf of grammars on the rank that draws."""
    mailbox: Mailbox
    reporter: Reporter
    clock: Clock
