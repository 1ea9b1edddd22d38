"""Which cores does each worker of a stack on one machine get, and each rank of a worker?"""

from collections.abc import Sequence
from itertools import pairwise

Cores = tuple[int, ...]


def share_cores(
    cores: Sequence[int], prefill: int, decode: int, prefill_ranks: int = 1, decode_ranks: int = 1
) -> tuple[list[Cores], list[Cores]]:
    """One run of cores per prefill and per decode worker, out of `cores` (at least one).

    The roles get cores by how many processes they are, `…_ranks` to a worker, and never share a core if
    there are two, so that a long prompt does not disturb the sequences being decoded. Workers of a role
    share only when it has fewer cores than workers. Nothing is kept for the bootstrap, which needs little
    and runs anywhere.
    """
    if not (prefill and decode):
        return deal_cores(cores, prefill), deal_cores(cores, decode)
    if len(cores) < 2:
        return [tuple(cores)] * prefill, [tuple(cores)] * decode
    computing, drawing = prefill * prefill_ranks, decode * decode_ranks
    cut = -(-len(cores) * computing // (computing + drawing))
    cut = max(1, min(len(cores) - 1, cut))
    return deal_cores(cores[:cut], prefill), deal_cores(cores[cut:], decode)


def cut_cores(cores: Sequence[int], both: int, one_sided: int) -> tuple[list[Cores], Cores]:
    """A run of `cores` for each worker of `both` sides, and what is left for so many `one_sided` processes:
    shared, where there are too few."""
    if not both or not one_sided:
        return deal_cores(cores, both), tuple(cores)
    if len(cores) < 2:
        return [tuple(cores)] * both, tuple(cores)
    cut = max(1, min(len(cores) - 1, len(cores) * both // (both + one_sided)))
    return deal_cores(cores[:cut], both), tuple(cores[cut:])


def deal_cores(cores: Sequence[int], processes: int) -> list[Cores]:
    """A run of `cores` for each process; one core each, shared, where there are fewer."""
    if not processes:
        return []
    if len(cores) < processes:
        return [(cores[process % len(cores)],) for process in range(processes)]
    size, over = divmod(len(cores), processes)
    starts = [process * size + min(process, over) for process in range(processes + 1)]
    return [tuple(cores[first:last]) for first, last in pairwise(starts)]
