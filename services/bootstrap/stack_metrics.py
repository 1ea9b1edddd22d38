"""Gauges of the whole stack, as gateways and autoscalers read them from one router.

The endpoint picker of the Gateway API Inference Extension takes every endpoint for one model server, and
reads vLLM's names. Here the endpoint is a router, so each gauge describes all of its workers together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomPhase
from baton.fleet.worker_record import Worker
from baton.rooms.phases import Side

MODEL_LABEL: Final = "model_name"


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """Requests in the router's queue for workers."""

    requests: int = 0
    prompt_tokens: int = 0
    """Number of prompt tokens of these requests. Cached prefixes are unknown yet, so they are included."""


class StackCollector(Collector):
    """Prometheus collector of gauges that describe the router and its workers as one model server."""

    def __init__(
        self,
        registry: Registry,
        queued: Callable[[], QueueCounts],
        now_ms: Callable[[], int],
        model_name: str,
    ) -> None:
        """Make a collector. `queued`: function that counts the requests waiting at the router. `now_ms`:
        clock of the registry. `model_name`: value of the label of vLLM's gauges."""
        self._registry = registry
        self._queued = queued
        self._now_ms = now_ms
        self._model_name = model_name

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield all gauges, by whose names Prometheus' library finds this collector."""
        return self.collect()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        queued = self._queued()
        yield self._as_vllm(
            "vllm:num_requests_waiting",
            "Clients' requests of this router without a first token: they wait for workers, or for their"
            " prompt to be computed. The name is vLLM's.",
            queued.requests + self._client_rooms(RoomPhase.OPEN),
        )
        yield self._as_vllm(
            "vllm:num_requests_running",
            "Clients' requests of this router that have their first token and are not answered yet. The name"
            " is vLLM's.",
            self._client_rooms(RoomPhase.STREAMING),
        )
        yield self._as_vllm(
            "vllm:kv_cache_usage_perc",
            "Share of the KV positions of ready workers that is in use, on the fuller side: 1 is all. The"
            " name is vLLM's.",
            max(self._usage(side) for side in Side),
        )
        yield GaugeMetricFamily(
            "baton_prefill_queue_seconds",
            "Expected time for one prefill worker to compute all prompts that wait, at the mean throughput of"
            " the ready ones. Divided by their number it is the time until the queue is computed. 0 until a"
            " throughput is known.",
            value=self._prefill_queue_s(queued.prompt_tokens),
        )

    def _as_vllm(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=[MODEL_LABEL])
        gauge.add_metric([self._model_name], value)
        return gauge

    def _ready(self, side: Side) -> list[Worker]:
        return list(self._registry.sides[side].ready)

    def _client_rooms(self, phase: RoomPhase) -> int:
        """Return the number of clients' rooms in a phase. Rooms of canaries (test requests) are left out."""
        canaries = {
            room
            for side in self._registry.sides.values()
            for worker in side.known
            for room in worker.canaries
        }
        return self._registry.phases[phase] - sum(
            self._registry.get(each).phase is phase for each in canaries
        )

    def _usage(self, side: Side) -> float:
        ready = self._ready(side)
        positions = sum(each.facts.tokens_max for each in ready)
        left = sum(max(each.usage.left, 0) for each in ready)
        return 1 - left / positions if positions else 0.0

    def _prefill_queue_s(self, queued_tokens: int) -> float:
        """Return the work of all waiting prompts in seconds of one prefill worker. `queued_tokens`: prompt
        tokens of requests that wait at the router."""
        ready = [each.queue for each in self._ready(Side.PREFILL) if each.queue.tokens_per_s]
        if not ready:
            return 0.0
        now_ms, tokens_per_s = self._now_ms(), sum(each.tokens_per_s for each in ready) / len(ready)
        return sum(each.left_ms(now_ms) or 0 for each in ready) / 1000 + queued_tokens / tokens_per_s
