"""Wiring of a decode worker: which implementations it uses, and how its side of a rank is made."""

from functools import partial
from typing import Final

from baton.decode.decode_service import DecodeService
from baton.decode.decode_work import DecodeWork
from baton.decode.draft_scheduler import DraftScheduler
from baton.decode.metrics import DecodeMetrics
from baton.decode.prefill_peers import FollowerPeers, LeaderPeers, Peers
from baton.decode.settings import DecodeSettings
from baton.engine_interface import EngineLoader
from baton.rooms.deadlines import Deadlines
from baton.rooms.phases import Side
from baton.runtime.errors import StartupError
from baton.wire.baton.v1 import inference_pb2_grpc, rooms_pb2
from baton.wire.receiver_secret import digest_of, draw_secret
from baton.worker.lifecycle.leader_host import WorkerHost
from baton.worker.wiring import Fitting, Rank, run_worker

DECODING_MS: Final = 3_600_000
"""Longest time in milliseconds for which a room may decode if the router set no deadline for it."""


def run(settings: DecodeSettings, load: EngineLoader) -> int:
    """Run a decode worker, or one rank of it, until a signal stops it. Return the exit code.

    `load`: loads the engine.
    """
    count = partial(DecodeMetrics, max_running=settings.max_running)
    return run_worker(settings, load, count, fit)


def fit(rank: Rank[DecodeSettings], metrics: DecodeMetrics) -> Fitting:
    """Return the parts of a rank that only a decode worker has: its work in a turn, its gRPC service and the
    digest of its secret."""
    settings, host = rank.settings, rank.host
    speculation, facts = settings.speculation, rank.engine.facts
    if (speculation.longest or speculation.ahead) and not (facts.chunked_prompts and facts.drafts):
        raise StartupError(
            f"--speculate {settings.speculate}: --engine {facts.name} checks no drafts of this"
            " model; leave it out"
        )
    secret = draw_secret()
    peers: Peers = FollowerPeers()
    if isinstance(host, WorkerHost):
        peers = LeaderPeers(rank.ports, host.channels, secret, settings.connect_timeout_ms / 1000)
    work = DecodeWork(
        rank.ports,
        Deadlines(
            bootstrapping_ms=2 * settings.connect_timeout_ms,
            waiting_ms=settings.prealloc_timeout_ms,
            transferring_ms=settings.transfer_timeout_ms,
            success_ms=DECODING_MS,
            fence_ms=settings.revoke_after_ms,
            orphan_ms=settings.orphan_ms,
        ),
        peers=peers,
        metrics=metrics,
        max_running=settings.max_running,
        drafting=DraftScheduler(speculation.longest, speculation.ahead, rank.engine.draft_pages),
        local_gap_ms=settings.local_gap_ms,
    )
    service = DecodeService(work)
    return Fitting(
        side=Side.DECODE,
        work=work,
        services=("baton.v1.DecodeService",),
        listen=lambda server: inference_pb2_grpc.add_DecodeServiceServicer_to_server(service, server),
        end=peers.stop,
        peer=rooms_pb2.Peer(secret_digest=digest_of(secret)),
    )
