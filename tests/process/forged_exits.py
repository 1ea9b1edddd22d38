"""A bootstrap that knows one worker by its registration, and reports of that worker's exit by others.

The registry and its gRPC service are the product's, with certificates. The worker is a real process, and may
be stopped. Its lease has run out.
"""

from dataclasses import replace
from pathlib import Path

from baton.ids import Incarnation
from baton.wire.baton.v1 import workers_pb2
from baton.wire.receiver_secret import digest_of
from baton.wire.service_role import ServiceRole
from tests.bootstrap.scripted import LEASE_MS
from tests.process.actors import Actor
from tests.safety.test_speaks_for import NEXT, registration, stack

NAME = "stopped"
PID = 4_321
OF_STARTER = b"drawn by the starter"
FORGED = (b"", bytes(16), b"drawn by somebody else", digest_of(OF_STARTER))
"""Secrets that the starter of the worker's process does not show."""


async def report_exits(worker: Actor, certificates: Path) -> tuple[set[str], list[Incarnation]]:
    """Report the worker's exit with certificates and no secret of its starter, and register another process
    by its name. Returns how the reports were answered, and what workers are told as departed."""
    async with stack(certificates) as bootstrap:
        at = bootstrap.at
        facts = replace(
            at.prefill.facts,
            name=NAME,
            incarnation=Incarnation(worker.incarnation),
            address=worker.address,
            pid=PID,
            exit_digest=digest_of(OF_STARTER),
        )
        at.rooms.register(facts)
        for _ in range(4):
            at.clock.advance(LEASE_MS)
            at.rooms.look()
        assert not at.registry.holds_lease(facts.incarnation)
        answers = {
            await bootstrap.ask(party, workers_pb2.ReportExitRequest(name=NAME, pid=PID, secret=secret))
            for party in (ServiceRole.PREFILL, ServiceRole.BOOTSTRAP)
            for secret in FORGED
        }
        assert await bootstrap.ask(ServiceRole.PREFILL, registration(ServiceRole.PREFILL, NAME, NEXT)) == "OK"
        return answers, at.registry.departed()
