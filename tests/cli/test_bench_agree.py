"""Does `baton bench agree` set the product's agreement beside gloo's own, for each size of group?"""

import json
import os
import subprocess
import sys

from services.rooms.ballot import HEADER

PATIENCE_S = 240
ROOMS = 40


def test_the_agreement_of_one_two_and_three_ranks_is_set_beside_an_all_reduce_of_the_same_bytes() -> None:
    command = [sys.executable, "-m", "services.cli.main", "bench", "agree", "--json"]
    result = subprocess.run(
        [*command, "--runs", "5", "--rooms", str(ROOMS)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    body = json.loads(result.stdout)
    assert body["bytes"] == 8 * (HEADER + ROOMS)
    assert [group["ranks"] for group in body["groups"]] == [1, 2, 3]
    for group in body["groups"]:
        medians = group["median_ms"]
        assert min(medians.values()) >= 0
        assert set(medians) == {"all_reduce", "agree", "broadcast", "turn", "wake"}
        assert group["ratio"] > 0
        assert group["wake_ms"] == medians["wake"] > 0
    assert body["ratio"] == max(group["ratio"] for group in body["groups"])
