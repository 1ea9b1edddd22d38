"""Which cores does each worker of a stack on one machine get?"""

from collections.abc import Sequence
from itertools import pairwise

Cores = tuple[int, ...]


def share_cores(cores: Sequence[int], prefill: int, decode: int) -> tuple[list[Cores], list[Cores]]:
    """One run of cores per prefill and per decode worker, out of `cores` (at least one).

    The roles never share a core if there are two, so that a long prompt does not disturb the sequences
    being decoded. Workers of a role share only when it has fewer cores than workers. Nothing is kept
    for the bootstrap, which needs little and runs anywhere.
    """
    if len(cores) < 2:
        return [tuple(cores)] * prefill, [tuple(cores)] * decode
    cut = -(-len(cores) * prefill // (prefill + decode))
    cut = max(1, min(len(cores) - 1, cut))
    return _deal(cores[:cut], prefill), _deal(cores[cut:], decode)


def _deal(cores: Sequence[int], workers: int) -> list[Cores]:
    if len(cores) < workers:
        return [(cores[worker % len(cores)],) for worker in range(workers)]
    size, over = divmod(len(cores), workers)
    starts = [worker * size + min(worker, over) for worker in range(workers + 1)]
    return [tuple(cores[first:last]) for first, last in pairwise(starts)]
