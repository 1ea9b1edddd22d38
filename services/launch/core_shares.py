"""Division of a machine's cores among the workers of a stack, and among a worker's ranks."""

from collections.abc import Sequence
from itertools import pairwise

Cores = tuple[int, ...]


def share_cores(
    cores: Sequence[int], prefill: int, decode: int, prefill_ranks: int = 1, decode_ranks: int = 1
) -> tuple[list[Cores], list[Cores]]:
    """Return the cores of each prefill worker and of each decode worker, out of `cores` (at least one).

    The sides get cores in proportion to their processes, `…_ranks` for each worker. They share no core if
    there are two, so that a long prompt does not disturb the sequences being decoded. Workers of a side
    share cores only if it has fewer cores than workers. The bootstrap gets no core of its own, since it needs
    little and runs anywhere.
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
    """Return the cores of each worker of both sides, and the cores left for the other processes.

    `both`: workers of both sides. `one_sided`: processes of the others. A single core is shared.
    """
    if not both or not one_sided:
        return deal_cores(cores, both), tuple(cores)
    if len(cores) < 2:
        return [tuple(cores)] * both, tuple(cores)
    cut = max(1, min(len(cores) - 1, len(cores) * both // (both + one_sided)))
    return deal_cores(cores[:cut], both), tuple(cores[cut:])


def deal_cores(cores: Sequence[int], processes: int) -> list[Cores]:
    """Return a run of `cores` for each process. Processes share single cores if there are fewer."""
    if not processes:
        return []
    if len(cores) < processes:
        return [(cores[process % len(cores)],) for process in range(processes)]
    size, over = divmod(len(cores), processes)
    starts = [process * size + min(process, over) for process in range(processes + 1)]
    return [tuple(cores[first:last]) for first, last in pairwise(starts)]
