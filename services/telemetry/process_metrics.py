"""Metrics about a process itself, which every service exports: its build and its use of resources.

`baton_build_info` is 1. Its labels name the process. By them a query can tell apart metrics that both prefill
and decode export:

    baton_kv_pages * on (namespace, job, instance) group_left (role, worker) baton_build_info
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics

DISTRIBUTION: Final = "baton-serve"


def release() -> str:
    """Return Baton's installed version, or `0+unknown` in a source tree that was never installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"


def describe_process(registry: CollectorRegistry, role: str, worker: str, rank: int) -> None:
    """Register `baton_build_info` and the resource metrics of this process.

    `rank`: number of the process among the worker's processes; 0 is the leader.
    """
    # Counters would have a second series with their creation time. `process_start_time_seconds` has it.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    info = Gauge(
        "baton_build_info",
        "Always 1. The labels name the process and its release.",
        ["version", "role", "worker", "rank"],
        registry=registry,
    )
    info.labels(release(), role, worker, str(rank)).set(1)
    ProcessCollector(registry=registry)
