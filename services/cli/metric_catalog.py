"""Catalog of all Prometheus metrics of all services, grouped by the question that they answer.

It is read from the collectors. All series of a service exist from its start, so that the first scrape shows
the values of each label.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry

from baton.api.http.metrics import HttpMetrics
from baton.bootstrap.metrics import BootstrapMetrics, RegistryCollector
from baton.bootstrap.stack_metrics import MODEL_LABEL, QueueCounts, StackCollector
from baton.decode.metrics import DecodeMetrics
from baton.fleet.registry import Registry
from baton.prefill.metrics import PrefillMetrics
from baton.telemetry.process_metrics import describe_process
from baton.web.closed_connections import ClosedConnections

BOOTSTRAP, PREFILL, DECODE = "bootstrap", "prefill", "decode"

QUESTIONS: Final[Mapping[str, Sequence[str]]] = {
    "Who is there?": (
        "baton_build_info",
        "baton_workers",
        "baton_workers_weight",
        "baton_alone_workers",
        "baton_kv_log_workers",
        "process_start_time_seconds",
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
        "process_open_fds",
        "process_max_fds",
    ),
    "How is it for clients?": (
        "baton_http_requests_total",
        "baton_http_connections_hung_up_total",
        "baton_tool_calls_total",
        "baton_choices_total",
        "baton_grammars_total",
        "baton_time_to_first_token_seconds",
        "baton_inter_token_latency_seconds",
    ),
    "Which side is the bottleneck, and of which is more needed?": (
        "baton_admission_queue_requests",
        "baton_side_queue_requests",
        "baton_admission_refused_requests_total",
        "baton_worker_places",
        "baton_worker_kv_tokens",
        "baton_prefill_queue_seconds",
        "baton_rooms_retracted_total",
        "baton_rooms_worker_full_total",
        "baton_retraction_recomputed_tokens_total",
        "baton_prompts_computed_total",
        "baton_prompt_tokens_computed_total",
        "baton_prefill_bootstrap_queue_requests",
        "baton_prefill_waiting_queue_requests",
        "baton_prefill_inflight_queue_requests",
        "baton_decode_prealloc_queue_requests",
        "baton_decode_transfer_queue_requests",
        "baton_decode_waiting_requests",
        "baton_decode_running_requests",
        "baton_decode_batch_places",
        "baton_step_seconds",
        "baton_prefill_tokens_total",
        "baton_prefill_scored_tokens_total",
        "baton_decode_tokens_total",
        "baton_decode_draft_tokens_total",
        "baton_decode_draft_pages",
        "baton_decode_local_rooms_total",
        "baton_decode_prompt_tokens_total",
        "baton_decode_pages_grown_total",
        "baton_decode_rooms_retracted_total",
        "baton_decode_retracted_tokens_total",
        "baton_prefix_queried_tokens_total",
        "baton_prefix_reused_tokens_total",
    ),
    "What does a gateway's endpoint picker read of the whole stack?": (
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
    ),
    "Where does the time go?": (
        "baton_admission_wait_seconds",
        "baton_retraction_pause_seconds",
        "baton_room_phase_seconds",
        "baton_prefill_first_token_seconds",
        "baton_kv_transfer_seconds",
        "baton_kv_transfer_bytes_total",
        "baton_kv_transfer_busy_seconds_total",
        "baton_kv_transfer_hidden_seconds_total",
        "baton_handover_seconds",
    ),
    "What failed, and why?": (
        "baton_rooms_failed_total",
        "baton_canaries_failed_total",
        "baton_request_retries_total",
        "baton_workers_lost_total",
        "baton_exits_not_believed_total",
        "baton_lease_failures_total",
        "baton_rooms_orphaned_total",
        "baton_rooms_adopted_total",
        "baton_rooms_unknown_news_total",
        "baton_timeline_lines_dropped_total",
    ),
    "Is memory kept?": (
        "baton_rooms",
        "baton_kv_pages",
        "baton_metadata_slots",
        "baton_kv_revocations_total",
    ),
    "Are the ranks of a worker, and its lease, in order?": (
        "baton_turns_total",
        "baton_agreement_seconds",
        "baton_lease_renewals_total",
        "baton_bootstrap_leases",
        "baton_bootstraps_known",
    ),
}
"""Names of all metrics by the operator's question that they answer, each name once."""

OPEN: Final[Mapping[tuple[str, str], str]] = {
    ("baton_build_info", "version"): "the release",
    ("baton_build_info", "role"): "`bootstrap`, `prefill`, `decode`",
    ("baton_build_info", "worker"): "the worker's name, or `bootstrap`",
    ("baton_build_info", "rank"): "`0` leads",
    ("baton_http_requests_total", "route"): "path templates that are served, or `none`",
    **dict.fromkeys(
        (
            ("vllm:num_requests_waiting", MODEL_LABEL),
            ("vllm:num_requests_running", MODEL_LABEL),
            ("vllm:kv_cache_usage_perc", MODEL_LABEL),
        ),
        "the model's name",
    ),
}
"""Description of the values of a label, by (metric, label). Listed are labels whose values are unknown before
a process runs."""

_UNITS: Final = frozenset(
    {"seconds", "bytes", "tokens", "requests", "rooms", "workers", "places", "pages", "slots"}
    | {"turns", "canaries", "renewals", "failures", "retries", "revocations", "news", "lines", "fds"}
    | {"connections", "calls", "prompts", "leases", "bootstraps"}
)


@dataclass(frozen=True, slots=True)
class Exported:
    """One Prometheus metric as one service exports it: name, type, help text and labels."""

    role: str
    name: str
    """Metric name, with `_total` for a counter, and without `_bucket`, `_sum` and `_count` for a
    histogram."""
    kind: str
    text: str
    labels: Mapping[str, Sequence[str]]
    """Values of each label that exist from the start, by label name. Empty for a label that is in OPEN."""

    @property
    def unit(self) -> str:
        """Unit of the metric's value: the last word of its name that is a unit, or an empty text."""
        return next((word for word in reversed(self.name.split("_")) if word in _UNITS), "")

    @property
    def series(self) -> Sequence[str]:
        """Names of the metric's time series in queries: its own name, or for a histogram the name with
        `_bucket`, `_sum` and `_count`."""
        suffixes = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return [self.name + suffix for suffix in suffixes]


def exported() -> list[Exported]:
    """Return every metric of every service, service by service, beginning with the bootstrap's."""
    return [each for role, registry in _registries() for each in _read(role, registry)]


def _registries() -> Iterator[tuple[str, CollectorRegistry]]:
    """Yield each service's role with a registry of its metrics, made as the service itself makes it."""
    bootstrap, prefill, decode = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    describe_process(bootstrap, BOOTSTRAP, BOOTSTRAP, rank=0)
    BootstrapMetrics(bootstrap)
    empty = Registry("", 1, 1, 1, 1)
    bootstrap.register(RegistryCollector(empty, dict, dict))
    bootstrap.register(StackCollector(empty, QueueCounts, lambda: 0, ""))
    HttpMetrics(bootstrap)
    ClosedConnections(bootstrap)
    yield BOOTSTRAP, bootstrap
    describe_process(prefill, PREFILL, PREFILL, rank=0)
    PrefillMetrics(prefill)
    ClosedConnections(prefill)
    yield PREFILL, prefill
    describe_process(decode, DECODE, DECODE, rank=0)
    DecodeMetrics(decode, max_running=1)
    ClosedConnections(decode)
    yield DECODE, decode


def _read(role: str, registry: CollectorRegistry) -> Iterator[Exported]:
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels: dict[str, list[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le" and value not in labels.setdefault(label, []):
                    labels[label].append(value)
        closed = {label: () if (name, label) in OPEN else values for label, values in labels.items()}
        yield Exported(role, name, family.type, family.documentation, closed)
