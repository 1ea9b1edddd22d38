"""Test of a stack at IPv6 addresses: it comes up and hands over."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.models.eight_heads import eight_heads
from tests.process.stack import STOP_S, Stack
from tests.wire.servers import has_ipv6

LOOPBACK = "::1"


@dataclass
class Ipv6Stack(Stack):
    """A stack whose services all listen on the IPv6 loopback address."""

    @property
    def url(self) -> str:
        return f"http://[{LOOPBACK}]:{self.http_port}"


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address (::1)")
def test_a_stack_on_the_ipv6_loopback_hands_over(tmp_path: Path, demo_model_dir: Path) -> None:
    model = eight_heads(tmp_path / "eight-heads", demo_model_dir)
    stack = Ipv6Stack(str(model), tmp_path, {"host": LOOPBACK, "kv_cache_memory": "64MiB"})
    flags = {"advertise": LOOPBACK, "bootstrap": f"[{LOOPBACK}]:{stack.grpc_port}"}
    try:
        stack.start_bootstrap(host=LOOPBACK, lease_ms="10000")
        stack.start_worker("prefill", "prefill-0", **flags)
        stack.start_worker("decode", "decode-0", **flags)
        stack.wait_ready()
        assert set(stack.stop().values()) == {0}, stack.tails()
    finally:
        for service in stack.services.values():
            service.process.kill()
            service.process.wait(STOP_S)
