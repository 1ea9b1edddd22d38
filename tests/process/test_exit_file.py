"""Tests of a restarted worker whose last exit was not reported: its next process reports it."""

import threading
from pathlib import Path

from tests.process.stack import SPLIT, running_stack
from tests.process.test_revocation import ANSWER_S, LONG, QUARANTINED, busy, complete, text_of


def test_a_platform_that_starts_a_killed_worker_again_gives_its_peers_their_pages_back(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    with running_stack(
        str(demo_model_dir),
        prefill=[{"chunk_tokens": "64", "exit_file": str(tmp_path / "exit")}],
        decode=[{"revoke_after_ms": "3600000", **SPLIT}],
        bootstrap={"retry_wait_ms": "120000"},
        dtype="float32",
        kv_cache_memory="256MiB",
        prefix_cache="false",
    ) as stack:
        start = stack.idle_gauges()
        decode, prefill = stack.services["decode-0"], stack.services["prefill-0"]
        asker = threading.Thread(target=complete, args=(stack, LONG), daemon=True)
        asker.start()
        busy([prefill])
        prefill.kill()
        stack.wait_until(lambda: decode.gauges()[QUARANTINED] > 0, ANSWER_S)
        assert stack.report_exit("prefill-0", prefill.process.pid, b"") == "NotProven", "by nobody else"
        stack.restart("prefill-0")
        stack.wait_until(lambda: decode.gauges()[QUARANTINED] == 0, ANSWER_S)
        assert decode.total("baton_kv_revocations_total") == 0, "the proof came, and no memory was moved"
        assert "Paris" in text_of(complete(stack, "The capital of France is"))
        asker.join(60.0)
        stack.wait_idle(start)
