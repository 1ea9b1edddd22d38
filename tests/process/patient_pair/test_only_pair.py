"""Tests of the only pair's streams: they wait for a worker that is restarted."""

import pytest

from tests.process.stack import Stack
from tests.process.test_failover import Killer, chat, rooms_of


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_the_only_pairs_stream_waits_for_the_worker_that_is_started_again(patient: Stack, side: str) -> None:
    """A prefill worker that dies while decode streams is not missed; a decode worker is waited for."""
    start = patient.idle_gauges()
    unbroken = chat(patient, temperature=0)
    killer = Killer(patient, side)

    def kill_and_restart(request_id: str, count: int) -> None:
        if not killer.victim:
            killer(request_id, count)
            if killer.victim:
                patient.restart(killer.victim)

    broken = chat(patient, kill_and_restart, temperature=0)
    assert killer.victim == f"{side}-0"
    assert (broken.ids, broken.text) == (unbroken.ids, unbroken.text)
    assert broken.done
    rooms = rooms_of(patient, broken.request_id)
    assert len(rooms) == (2 if side == "decode" else 1)
    patient.wait_ready()
    patient.wait_idle(start)
