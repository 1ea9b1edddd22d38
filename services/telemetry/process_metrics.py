"""What does every process say of itself, beside what its service counts?

`baton_build_info` is 1 and says by its labels who this is, so that what both sides count can be told apart:

    baton_kv_pages * on (namespace, job, instance) group_left (role, worker) baton_build_info
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics

DISTRIBUTION: Final = "baton-serve"


def release() -> str:
    """The installed version; a source tree that was never installed has none."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"


def describe_process(registry: CollectorRegistry, role: str, worker: str, rank: int) -> None:
    """`rank`: of the worker's processes, 0 leads."""
    # Of each counter, a second series that says when it was made: `process_start_time_seconds` does.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    info = Gauge(
        "baton_build_info",
        "1, of each process: who it is and what it runs.",
        ["version", "role", "worker", "rank"],
        registry=registry,
    )
    info.labels(release(), role, worker, str(rank)).set(1)
    ProcessCollector(registry=registry)
