"""Authorization of gRPC calls by the role that the caller's certificate names."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import grpc

from baton.rooms.phases import Side
from baton.wire.baton.v1 import rooms_pb2, workers_pb2
from baton.wire.conversions import side_to_wire
from baton.wire.errors import NotAdmitted, errors_as_status
from baton.wire.handler_wrapper import wrap_handler
from baton.wire.service_role import ServiceRole

OURS: Final = "/baton.v1."
SAN: Final = "x509_subject_alternative_name"

BOOTSTRAP: Final = frozenset({ServiceRole.BOOTSTRAP})
WORKERS: Final = frozenset({ServiceRole.PREFILL, ServiceRole.DECODE})
ALL: Final = BOOTSTRAP | WORKERS

ALLOWED_CALLERS: Final[Mapping[str, frozenset[ServiceRole]]] = {
    "BootstrapService/GetPage": BOOTSTRAP,
    "WorkerRegistry/Register": WORKERS,
    "WorkerRegistry/Renew": WORKERS,
    "WorkerRegistry/Drain": WORKERS,
    "WorkerRegistry/Leave": WORKERS,
    "WorkerRegistry/ReportExit": ALL,  # the worker's starter: its launcher, or that of the whole stack
    "WorkerRegistry/SetWeight": BOOTSTRAP,  # its certificate already allows to start and stop everything
    "PresenceService/WhoIsThere": BOOTSTRAP,
    "KvEventService/WatchKvEvents": BOOTSTRAP,
    "RoomService/OpenRoom": BOOTSTRAP,
    "RoomService/WatchRoom": BOOTSTRAP,
    "RoomService/ReportRooms": ALL,
    "RoomService/CancelRoom": BOOTSTRAP,
    "RoomService/GetRoom": BOOTSTRAP,
    "RoomService/ListRooms": BOOTSTRAP,
    "PrefillService/RunRoom": BOOTSTRAP,
    "PrefillService/RunRooms": BOOTSTRAP,
    "DecodeService/StreamRoom": BOOTSTRAP,
    "DecodeService/StreamRooms": BOOTSTRAP,
    "HandoverService/HandOver": frozenset({ServiceRole.DECODE}),
}
"""Roles that may call each method of Baton's own services. A method that is missing here is refused to all
callers. The health and reflection services reveal nothing about rooms. Any caller with a certificate may use
them."""


SIDES: Final = {ServiceRole.of(side): side_to_wire(side) for side in Side}


class AuthorizationInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Interceptor that checks whether the caller's certificate allows the call (`known-callers-only`).

    It is used on servers that ask for certificates.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(OURS):
            return handler
        allowed = ALLOWED_CALLERS.get(details.method.removeprefix(OURS), frozenset())

        async def admit(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with errors_as_status(context):
                _check_own(_admitted(context, allowed), request)
            return request

        return wrap_handler(admit, handler, handler.request_deserializer)


def has_certificate(context: grpc.aio.ServicerContext) -> bool:
    """Return whether the caller showed a certificate.

    On a port that asks for certificates, every caller that `AuthorizationInterceptor` admitted did. On a
    plain port, none did.
    """
    return bool(_names(context))


def check_caller_side(
    context: grpc.aio.ServicerContext, side: Side, also: frozenset[ServiceRole] = frozenset()
) -> None:
    """Raise NotAdmitted if the caller has a certificate, but for neither the role of `side` nor a role in
    `also`."""
    allowed = also | {ServiceRole.of(side)}
    if has_certificate(context):
        _admitted(context, allowed)


def _names(context: grpc.aio.ServicerContext) -> set[str]:
    """Return the names in the caller's certificate, or an empty set if it has none."""
    return {name.decode("utf-8", "replace") for name in context.auth_context().get(SAN, ())}


def _admitted(context: grpc.aio.ServicerContext, allowed: frozenset[ServiceRole]) -> frozenset[ServiceRole]:
    """Return the roles in `allowed` that the caller's certificate names. Raises NotAdmitted if there are
    none."""
    names = _names(context)
    parties = frozenset(party for party in allowed if party.tls_name in names)
    if not parties:
        wanted = " or ".join(sorted(party.tls_name for party in allowed)) or "nobody"
        raise NotAdmitted(f"this is for {wanted}: the caller's certificate has another name")
    return parties


def _check_own(parties: frozenset[ServiceRole], request: object) -> None:
    """Check that a worker registers only for the side that its certificate names, and reports its own
    incarnation.

    Raises NotAdmitted.
    """
    callers = " and ".join(sorted(parties))
    if isinstance(request, workers_pb2.RegisterRequest) and request.side not in map(SIDES.get, parties):
        raise NotAdmitted(f"the certificate is a {callers} worker's, the registration is not")
    nameless = isinstance(request, rooms_pb2.ReportRoomsRequest) and not request.incarnation
    if nameless and ServiceRole.BOOTSTRAP not in parties:
        raise NotAdmitted(f"a {callers} worker reports under its own incarnation, not without one")
