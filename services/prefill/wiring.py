"""Wiring of a prefill worker: which implementations it uses, and how its side of a rank is made."""

import grpc

from baton.engine_interface import EngineLoader
from baton.prefill.metrics import PrefillMetrics
from baton.prefill.prefill_service import HandoverService, PrefillService
from baton.prefill.prefill_work import PrefillWork
from baton.prefill.settings import PrefillSettings
from baton.rooms.deadlines import Deadlines
from baton.rooms.phases import Side
from baton.wire.baton.v1 import inference_pb2_grpc, rooms_pb2
from baton.worker.prompt_budget import FULL_BUDGET, PromptBudget
from baton.worker.wiring import Fitting, Rank, run_worker


def run(settings: PrefillSettings, load: EngineLoader) -> int:
    """Run a prefill worker, or one rank of it, until a signal stops it. Return the exit code.

    `load`: loads the engine.
    """
    return run_worker(settings, load, PrefillMetrics, fit)


def fit(
    rank: Rank[PrefillSettings], metrics: PrefillMetrics, prompt_budget: PromptBudget = FULL_BUDGET
) -> Fitting:
    """Return the parts of a rank that only a prefill worker has: its work in a turn and its gRPC services.
    `prompt_budget`: limit set by a decode side whose steps run on the same thread."""
    settings = rank.settings
    deadlines = Deadlines(
        bootstrapping_ms=settings.bootstrap_timeout_ms,
        waiting_ms=settings.waiting_timeout_ms,
        transferring_ms=settings.transfer_timeout_ms,
        success_ms=settings.transfer_timeout_ms,
        fence_ms=settings.transfer_timeout_ms,
        orphan_ms=settings.orphan_ms,
    )
    work = PrefillWork(
        rank.ports,
        deadlines,
        metrics=metrics,
        chunk_tokens=settings.chunk_tokens,
        window_bytes=settings.transfer_window,
        scored_tokens=rank.engine.scored_max,
        prompt_budget=prompt_budget,
    )
    rooms, handover = PrefillService(work), HandoverService(work)

    def listen(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_PrefillServiceServicer_to_server(rooms, server)
        inference_pb2_grpc.add_HandoverServiceServicer_to_server(handover, server)

    return Fitting(
        side=Side.PREFILL,
        work=work,
        services=("baton.v1.PrefillService", "baton.v1.HandoverService"),
        listen=listen,
        end=handover.leave,
        peer=rooms_pb2.Peer(),
    )
