"""Model of a stack, and the checks that a new worker fits it and the other workers.

It is pure. Every error names the field that differs (`schema-agreed`).
"""

from dataclasses import dataclass

from baton.pages.layout import PLAIN
from baton.rooms.errors import WorkerRefused
from baton.rooms.worker_facts import StackFacts, WorkerFacts


@dataclass(slots=True)
class StackModel:
    """Model that all workers of a stack serve."""

    fingerprint: str
    """Fingerprint of configuration and weights. While the weights are unknown, it is the configuration's,
    with which each worker's begins."""
    context_length: int
    """Most tokens of a sequence on every worker."""
    weights_known: bool = True
    """Whether `fingerprint` is whole.

    The first worker that registers makes it so, for the life of this process. Another set of weights is
    refused also while no worker is left: a request that waits for workers goes on after its own output.
    """

    def check(self, facts: WorkerFacts) -> None:
        """Raise WorkerRefused unless a worker serves this model."""
        begins = facts.model.startswith(self.fingerprint) and len(facts.model) > len(self.fingerprint)
        if not (facts.model == self.fingerprint if self.weights_known else begins):
            raise WorkerRefused("model", self.fingerprint, facts.model)
        if facts.context_length != self.context_length:
            raise WorkerRefused("context_length", str(self.context_length), str(facts.context_length))

    def accept(self, facts: WorkerFacts) -> None:
        """Record that a worker which passed all checks is registered: its weights are the stack's."""
        self.fingerprint, self.weights_known = facts.model, True


def check_stack(known: StackFacts, new: StackFacts) -> None:
    """Raise WorkerRefused unless a new worker has what all workers need in common."""
    got = new.in_words()
    for name, want in known.in_words().items():
        if want != got[name]:
            raise WorkerRefused(name, want, got[name])


def check_pages(known: int, new: WorkerFacts) -> None:
    """Raise WorkerRefused unless pages of `known` tokens and a new worker's can be handed over."""
    small, large = sorted((known, new.page_tokens))
    encoded = any(each != PLAIN for each in new.stack.encoding)
    if encoded and small != large:
        raise WorkerRefused("page_tokens", str(known), f"{new.page_tokens}: encoded pages go whole")
    if large % small:
        raise WorkerRefused("page_tokens", str(known), f"{new.page_tokens}: neither is a multiple")
