"""Tests of the text formats of `/metrics`."""

import pytest
from prometheus_client import CollectorRegistry, Gauge

from baton.web.metrics_exposition import OPEN_METRICS, choose_exposition


@pytest.mark.parametrize(
    "accept", ["", "text/plain", OPEN_METRICS, f"{OPEN_METRICS};version=1.0.0;escaping=underscores"]
)
def test_a_name_of_vllms_keeps_its_colon_in_every_format(accept: str) -> None:
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Running.", registry=registry).set(3)
    write, media_type = choose_exposition(accept)
    assert b"\nvllm:num_requests_running 3.0\n" in write(registry)
    assert media_type.startswith(OPEN_METRICS if OPEN_METRICS in accept else "text/plain")
