"""Tests of latencies, compared with the metrics library's histograms."""

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from baton.api.http.metrics import ITL_BUCKETS_S, TTFT_BUCKETS_S, HttpMetrics
from baton.bootstrap.settings import BootstrapSettings
from baton.telemetry.histogram import LoopHistogram

VALUES = (0.0, 0.001, 0.0011, 0.25, 2.5, 2.6, 100.0)


def test_a_tally_is_told_as_the_librarys_histogram_is() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = LoopHistogram("x_seconds", "Of x.", ITL_BUCKETS_S)
    ours.register(tally)
    histogram = Histogram("x_seconds", "Of x.", buckets=ITL_BUCKETS_S, registry=theirs)
    for value in VALUES:
        tally.observe(value)
        histogram.observe(value)
    kept = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == kept


def test_what_may_be_waited_for_is_told_from_what_is_longer() -> None:
    """A quantile beyond the last bound is that bound."""
    settings = BootstrapSettings()
    assert TTFT_BUCKETS_S[-1] * 1000 >= settings.request_timeout_ms
    assert ITL_BUCKETS_S[-1] * 1000 >= settings.request_timeout_ms


def test_tokens_that_came_together_are_as_many() -> None:
    registry = CollectorRegistry()
    tally = LoopHistogram("x_seconds", "Of x.", ITL_BUCKETS_S)
    registry.register(tally)
    tally.observe(0.002, 8)
    assert registry.get_sample_value("x_seconds_count") == 8
    assert registry.get_sample_value("x_seconds_sum") == pytest.approx(0.016)


def test_what_is_served_is_there_before_its_first_request() -> None:
    registry = CollectorRegistry()
    metrics = HttpMetrics(registry)
    metrics.expect(["/v1/models"])
    for route in ("/v1/models", "none"):
        for status in ("200", "503", "other"):
            labels = {"route": route, "status": status}
            assert registry.get_sample_value("baton_http_requests_total", labels) == 0
    metrics.count_request("/v1/models", 418)
    labels = {"route": "/v1/models", "status": "other"}
    assert registry.get_sample_value("baton_http_requests_total", labels) == 1
