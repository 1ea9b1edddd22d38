"""Division of a machine's CPU cores among the workers of a stack, and among a worker's ranks."""

from collections.abc import Sequence
from itertools import pairwise

Cores = tuple[int, ...]


def share_cores(
    cores: Sequence[int], prefill: int, decode: int, prefill_ranks: int = 1, decode_ranks: int = 1
) -> tuple[list[Cores], list[Cores]]:
    """Return the cores of each prefill worker and of each decode worker, out of `cores` (at least one).

    The sides get cores in proportion to their numbers of processes, which are `…_ranks` for each worker. If
    there are at least two cores, prefill and decode share none, so that a long prompt does not delay
    decoding. Workers of a side share cores only if it has fewer cores than workers. The bootstrap gets no
    core of its own, because it needs little and runs anywhere.
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
    """Return the cores of each worker that serves both sides, and the cores left for other workers'
    processes.

    `both`: number of workers that serve both sides. `one_sided`: number of processes of the other workers. A
    single core is shared.
    """
    if not both or not one_sided:
        return deal_cores(cores, both), tuple(cores)
    if len(cores) < 2:
        return [tuple(cores)] * both, tuple(cores)
    cut = max(1, min(len(cores) - 1, len(cores) * both // (both + one_sided)))
    return deal_cores(cores[:cut], both), tuple(cores[cut:])


def deal_cores(cores: Sequence[int], processes: int) -> list[Cores]:
    """Return adjacent cores for each of `processes`. If there are fewer cores, processes share
    single cores."""
    if not processes:
        return []
    if len(cores) < processes:
        return [(cores[process % len(cores)],) for process in range(processes)]
    size, over = divmod(len(cores), processes)
    starts = [process * size + min(process, over) for process in range(processes + 1)]
    return [tuple(cores[first:last]) for first, last in pairwise(starts)]
