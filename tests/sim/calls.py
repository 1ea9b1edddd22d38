"""Simulated gRPC for the generated stubs and servicers.

A `Channel` has what the stubs call, a `SimulatedServer` what `add_…Servicer_to_server` registers with;
between the two go bytes. The rules are grpc.aio's: a call that ends early in any way is cancelled at its
server, a call that this side cancels raises CancelledError, everything else an AioRpcError.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import grpc

from tests.sim.loop import SimulatedProcess, this_process
from tests.sim.network import Network, rpc_error, unavailable

OVERTAKES: Final = 0.3
"""Share of calls that overtake waiting ones."""

Bytes = Callable[[Any], bytes]
Message = Callable[[bytes], Any]
Status: TypeAlias = "grpc.aio.AioRpcError | None"


class Aborted(Exception):
    """A handler answered with a status."""

    def __init__(self, status: grpc.aio.AioRpcError) -> None:
        super().__init__(status.details())
        self.status = status


class Context:
    """The part of a ServicerContext that Baton's handlers use."""

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return no certificate, since the simulation has none."""
        return {}

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, str], ...] = ()
    ) -> None:
        raise Aborted(rpc_error(code, details, trailing_metadata))


class SimulatedServer:
    """The gRPC server of one process. `open` is set when it starts to listen."""

    def __init__(self, network: Network, process: SimulatedProcess, address: str) -> None:
        self._network = network
        self.process = process
        self.address = address
        self.methods: dict[str, Any] = {}
        self.late_s = 0.0
        """Seconds that a call waits in the process's queue because its loop is busy."""
        self.accepted = 0
        self._random = random.Random(address)
        self._waiting: deque[Callable[[SimulatedServer], None]] = deque()
        self._accepted_s = 0.0
        """Time at which the last call is accepted. The queue keeps their order."""

    def open(self) -> None:
        self._network.listen(self.address, self)

    def accept(self, begin: Callable[["SimulatedServer"], None]) -> None:
        """A call has come: it begins when those before it have. One that comes while others wait may overtake
        all of them; then one of them is accepted beside it."""
        loop = self._network.loop
        at_s = max(loop.time() + self.late_s, self._accepted_s)
        if self._waiting and self._random.random() < OVERTAKES:
            self._accept_next()
            self.process.soon(begin, self)
        elif at_s > loop.time():
            self._accepted_s = at_s
            self._waiting.append(begin)
            loop.call_at(at_s, self._accept_next)
        else:
            self.process.soon(begin, self)

    def _accept_next(self) -> None:
        if self._waiting:
            self.process.soon(self._waiting.popleft(), self)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; wait for those that there are, no longer than so. The end of the process breaks
        what is left."""
        self._network.unlisten(self.address)
        loop = self._network.loop
        ends = loop.time() + grace_s
        while loop.time() < ends and self._network.serves(self.process):
            await asyncio.sleep(0.05)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The registered ones say the same."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        for name, handler in handlers.items():
            self.methods[f"/{service}/{name}"] = handler


class Channel:
    """A simulated gRPC channel from one process to one address."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._calls: dict[int, SimulatedCall] = {}

    def unary_unary(
        self, method: str, request_serializer: Bytes, response_deserializer: Message, **_: object
    ) -> Callable[..., "UnaryCall"]:
        def call(request: Any, timeout: float | None = None, **_: object) -> UnaryCall:
            reader = UnaryCall(response_deserializer)
            self._start(reader, method, request_serializer(request), timeout)
            return reader

        return call

    def unary_stream(
        self, method: str, request_serializer: Bytes, response_deserializer: Message, **_: object
    ) -> Callable[..., "StreamCall"]:
        def call(request: Any, timeout: float | None = None) -> StreamCall:
            reader = StreamCall(response_deserializer)
            self._start(reader, method, request_serializer(request), timeout)
            return reader

        return call

    def stream_stream(
        self, method: str, request_serializer: Bytes, response_deserializer: Message, **_: object
    ) -> Callable[..., "SharedCall"]:
        def call(timeout: float | None = None) -> SharedCall:
            reader = SharedCall(response_deserializer, request_serializer)
            self._start(reader, method, b"", timeout)
            return reader

        return call

    def _start(
        self, reader: "UnaryCall | StreamCall", method: str, request: bytes, timeout: float | None
    ) -> None:
        reader.call = SimulatedCall(
            self._network, self._address, method, request, reader, timeout, self._calls
        )

    async def close(self, grace: float | None = None) -> None:
        for call in list(self._calls.values()):
            call.cancel()


class SimulatedCall:
    """One RPC with both of its ends. It ends once: `reader` is told, and the handler is cancelled if it still
    runs."""

    def __init__(
        self,
        network: Network,
        address: str,
        method: str,
        request: bytes,
        reader: "UnaryCall | StreamCall",
        timeout_s: float | None,
        siblings: "dict[int, SimulatedCall]",
    ) -> None:
        self._network = network
        self._loop = network.loop
        self._address = address
        self.host = address.partition(":")[0]
        self._method = method
        self._name = method.rpartition("/")[2]
        self._request = request
        self._reader: UnaryCall | StreamCall | None = reader
        self.caller = this_process()
        self.server_process: SimulatedProcess | None = None
        self._handler: asyncio.Task[None] | None = None
        self._over = False
        self._arrives_s = self._answers_s = 0.0
        self._came: asyncio.Queue[bytes] = asyncio.Queue()
        """Requests of a call that can have many."""
        self._timer: asyncio.TimerHandle | None = None
        self._siblings = siblings
        self._number = network.opened(self)
        siblings[self._number] = self
        self._note("call")
        network.sent[self._name] += 1
        if timeout_s is not None:
            self._timer = self._loop.call_later(max(timeout_s, 0.0), self._too_late)
        self._within = self.caller.host == self.host
        """Whether the process calls itself, so that no message is lost."""
        if not self._within and network.loses():
            self._loop.call_later(network.patience_s(), self.break_off, "Connection timed out")
            return
        late_s = network.late_request_s(self._name)
        self._arrives_s = network.carry(self.caller.host, self.host, self._arrive, late_s)
        again_s = network.doubles(self._name)
        if again_s is not None:
            self._loop.call_later(again_s, self._arrive_again)

    def send(self, request: bytes) -> None:
        """Send one more request of a streaming call. It or its answer is lost as often as in a call of its
        own. A loss ends the connection and the call."""
        if self._over:
            return
        self._network.sent[self._name] += 1
        if self._network.loses():
            self._loop.call_later(self._network.patience_s(), self.break_off, "Connection timed out")
            return
        self._arrives_s = self._network.carry(
            self.caller.host, self.host, lambda: self._take(request), self._arrives_s
        )

    # ---- at the server

    def _take(self, request: bytes) -> None:
        if self._over or self.server_process is None:
            return
        self._note("request")
        self.server_process.soon(self._came.put_nowait, request)
        if self._network.loses_answer():
            self._loop.call_later(self._network.patience_s(), self.break_off, "Connection timed out")

    async def _requests(self, read: Message, server: SimulatedServer) -> AsyncIterator[Any]:
        while True:
            request = await self._came.get()
            await self._network.handle(server.process)
            yield read(request)

    def _arrive(self) -> None:
        if self._over:
            return
        server = self._network.server(self._address)
        if server is None:
            # No process listens there: refused at once.
            self._network.carry(self.host, self.caller.host, lambda: self.break_off("Connection refused"), 0)
            return
        self.server_process = server.process
        server.accept(self._begin)

    def _begin(self, server: SimulatedServer) -> None:
        server.accepted += 1
        if not self._over:
            self._note("arrived")
            self._handler = server.process.spawn(self._serve(server))

    def _arrive_again(self) -> None:
        server = self._network.server(self._address)
        if server is not None:
            server.process.soon(self._serve_again, server)

    def _serve_again(self, server: SimulatedServer) -> None:
        async def ignored() -> None:
            await self._outcome(server, lambda _: None)

        self._note("arrived again")
        server.process.spawn(ignored())

    async def _serve(self, server: SimulatedServer) -> None:
        self._answers_s = self._network.late_answer_s(self._name)
        status = await self._outcome(server, self._send)
        if not self._within and self._network.loses_answer():
            self._loop.call_later(self._network.patience_s(), self.break_off, "Connection timed out")
        else:
            self._back(lambda: self._end(status))

    async def _outcome(self, server: SimulatedServer, send: Callable[[bytes], None]) -> Status:
        method = server.methods.get(self._method)
        if method is None:
            return rpc_error(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        read = method.request_deserializer
        try:
            if method.request_streaming:
                async for reply in method.stream_stream(self._requests(read, server), Context()):
                    send(method.response_serializer(reply))
                return None
            await self._network.handle(server.process)
            request = read(self._request)
            if method.response_streaming:
                async for reply in method.unary_stream(request, Context()):
                    send(method.response_serializer(reply))
            else:
                send(method.response_serializer(await method.unary_unary(request, Context())))
        except Aborted as error:
            return cast(Status, error.status)
        except Exception as error:
            # grpc answers UNKNOWN, and the process goes on: a bug all the same.
            self._loop.problems.append(f"{self._method} raised {error!r}")
            return rpc_error(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        return None

    def _send(self, reply: bytes) -> None:
        self._back(lambda: self._deliver(reply))

    def _back(self, message: Callable[[], None]) -> None:
        self._answers_s = self._network.carry(self.host, self.caller.host, message, self._answers_s)

    # ---- at the caller

    def _deliver(self, reply: bytes) -> None:
        if not self._over and self._reader is not None:
            self._note("reply")
            self.caller.soon(self._reader.came, reply)

    def _end(self, status: Status) -> None:
        if self._over:
            return
        self._close()
        self._note("ended", "OK" if status is None else status.code().name)
        if self._reader is not None:
            self.caller.soon(self._reader.ended, status)

    def break_off(self, why: str) -> None:
        """The connection is gone: both ends learn it by themselves."""
        if self._over:
            return
        handler = self._handler
        self._end(unavailable(why))
        self._stop(handler)

    def cancel(self) -> bool:
        """Cancel by the caller. Nothing of the call arrives any more."""
        if self._over:
            return False
        handler = self._handler
        self._close()
        self._note("cancelled")
        if self._reader is not None:
            self._reader.cancelled()
        self._network.carry(self.caller.host, self.host, lambda: self._stop(handler or self._handler), 0.0)
        return True

    def _too_late(self) -> None:
        """End the call at its deadline, which both ends know."""
        handler = self._handler
        if not self._over:
            self._end(rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
            self._stop(handler)

    def _stop(self, handler: asyncio.Task[None] | None) -> None:
        if handler is not None and self.server_process is not None:
            self.server_process.soon(handler.cancel)

    def _close(self) -> None:
        self._over = True
        self._network.ended(self._number)
        self._siblings.pop(self._number, None)
        if self._timer is not None:
            self._timer.cancel()

    def _note(self, what: str, detail: str = "") -> None:
        self._network.trace.note(
            self._loop.time(), self.caller.name, f"{what} {self._name}", 0, f"{self._number} {detail}"
        )


class UnaryCall:
    """Call of a stub's unary method."""

    call: SimulatedCall

    def __init__(self, read: Message) -> None:
        self._read = read
        self._reply: bytes | None = None
        self._done: asyncio.Future[Status] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            status = yield from self._done
        except asyncio.CancelledError:
            self.call.cancel()
            raise
        if status is not None:
            raise status
        assert self._reply is not None
        return self._read(self._reply)

    def came(self, reply: bytes) -> None:
        self._reply = reply

    def ended(self, status: Status) -> None:
        if not self._done.done():
            self._done.set_result(status)

    def cancelled(self) -> None:
        self._done.cancel()

    def cancel(self) -> bool:
        return self.call.cancel()


class StreamCall:
    """Call of a stub's streaming method."""

    call: SimulatedCall

    def __init__(self, read: Message) -> None:
        self._read = read
        self._replies: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._status: Status = None
        self._over = self._cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            while self._replies:
                yield self._read(self._replies.popleft())
            if self._cancelled:
                raise asyncio.CancelledError
            if self._over:
                if self._status is not None:
                    raise self._status
                return
            self._news.clear()
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self.call.cancel()
                raise

    def came(self, reply: bytes) -> None:
        self._replies.append(reply)
        self._news.set()

    def ended(self, status: Status) -> None:
        self._over, self._status = True, status
        self._news.set()

    def cancelled(self) -> None:
        self._cancelled = True
        self._news.set()

    def cancel(self) -> bool:
        return self.call.cancel()


class SharedCall(StreamCall):
    """Call of a stub's method with streams both ways. Its requests do not end before the call."""

    def __init__(self, read: Message, serialize: Bytes) -> None:
        super().__init__(read)
        self._serialize = serialize
        self._on_end: list[Callable[[SharedCall], None]] = []

    def add_done_callback(self, callback: "Callable[[SharedCall], None]") -> None:
        self._on_end.append(callback)

    def ended(self, status: Status) -> None:
        super().ended(status)
        self._tell_end()

    def cancelled(self) -> None:
        super().cancelled()
        self._tell_end()

    async def code(self) -> grpc.StatusCode:
        if self._cancelled:
            return grpc.StatusCode.CANCELLED
        return grpc.StatusCode.OK if self._status is None else self._status.code()

    async def details(self) -> str | None:
        return None if self._status is None else self._status.details()

    async def initial_metadata(self) -> Any:
        return grpc.aio.Metadata() if self._status is None else self._status.initial_metadata()

    async def trailing_metadata(self) -> Any:
        return grpc.aio.Metadata() if self._status is None else self._status.trailing_metadata()

    def _tell_end(self) -> None:
        callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback(self)

    async def write(self, request: Any) -> None:
        if self._over or self._cancelled:
            raise asyncio.InvalidStateError("the call has ended")
        self.call.send(self._serialize(request))
