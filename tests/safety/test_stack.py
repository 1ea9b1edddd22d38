"""Tests of a whole stack behind keys, HTTPS and mutual TLS: access, refusals and leaks."""

import asyncio
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import httpx
import openai
import psutil
import pytest

from baton.wire.baton.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    rooms_pb2,
    rooms_pb2_grpc,
    workers_pb2,
    workers_pb2_grpc,
)
from baton.wire.channel import open_channel
from baton.wire.errors import RemoteError, remote_error
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity
from baton.worker.lifecycle.lazy_exit_report import reporter
from baton.worker.lifecycle.lease_keeper import LeaseKeeper
from tests.models.eight_heads import eight_heads
from tests.ports import free_port
from tests.process.stack import Stack
from tests.safety.certificates import flags, of
from tests.safety.waiting import until
from tests.support.shared import Shared

pytestmark = pytest.mark.stack

FILE_KEY: Final = "sk-from-the-file-0123456789"
SECOND_KEY: Final = "sk-another-of-the-file-01234"
VARIABLE_KEY: Final = "sk-from-the-variable-012345"
HF_TOKEN: Final = "hf_abcdefghijklmnopqrstuvwxyz"
PROMPT: Final = [1, 5, 25, 125, 625]
CALL_S: Final = 20.0
BODY_MAX: Final = 64 * 1024


@dataclass
class SafeStack(Stack):
    """Stack whose pages have a port of their own; `url` is its address."""

    admin_port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.admin_port}"

    @property
    def api(self) -> str:
        return f"https://127.0.0.1:{self.http_port}"

    def address(self, name: str) -> str:
        """A worker's gRPC address, as it told the bootstrap."""
        log = self.services[name].log.read_text()
        return f"127.0.0.1:{log.partition('grpc_port=')[2].split()[0]}"

    def incarnation(self, name: str) -> int:
        return next(int(each["incarnation"]) for each in self.workers() if each["name"] == name)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys"


@contextmanager
def safe_stack(model: Path, ours: Path, key_file: Path, folder: Path) -> Iterator[SafeStack]:
    key_file.write_text(f"# the team's\n{FILE_KEY}\n")
    environ = {"HF_TOKEN": HF_TOKEN, "BATON_API_KEYS": VARIABLE_KEY}
    stack = SafeStack(
        str(model),
        folder,
        {"dtype": "float32", "kv_cache_memory": "64MiB", "log_level": "debug"},
        environ,
    )
    patched = pytest.MonkeyPatch()
    patched.setenv("SSL_CERT_FILE", str(ours / "ca.crt"))  # of every client below
    try:
        stack.start_bootstrap(
            api_key_file=str(key_file),
            http_tls_cert=str(ours / "http.crt"),
            http_tls_key=str(ours / "http.key"),
            admin_port=str(stack.admin_port),
            max_body_bytes=str(BODY_MAX),
            log_level="debug",
            **flags(ours, "bootstrap"),
        )
        stack.start_worker("prefill", "prefill-0", **flags(ours, "prefill"))
        stack.start_worker("decode", "decode-0", **flags(ours, "decode"))
        stack.wait_ready()
        yield stack
    finally:
        patched.undo()
        for service in stack.services.values():
            service.kill()


@pytest.fixture(scope="module")
def stacks(
    demo_model_dir: Path, ours: Path, key_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared[SafeStack]]:
    model = eight_heads(tmp_path_factory.mktemp("model"), demo_model_dir)
    with Shared(lambda: safe_stack(model, ours, key_file, tmp_path_factory.mktemp("stack"))) as shared:
        yield shared


@pytest.fixture
def safe(stacks: Shared[SafeStack], request: pytest.FixtureRequest) -> SafeStack:
    return stacks.lend(request.node)


def client(safe: SafeStack, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{safe.api}/v1", api_key=key, max_retries=0, timeout=60)


def ask(safe: SafeStack, key: str) -> str:
    with client(safe, key) as asked:
        model = asked.models.list().data[0].id
        reply = asked.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=16)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16
    return reply.choices[0].text


def test_openais_client_is_answered_over_https_with_a_key_of_the_file_or_the_variable(
    safe: SafeStack, strangers: Path
) -> None:
    assert ask(safe, FILE_KEY) == ask(safe, VARIABLE_KEY)
    with pytest.raises(openai.AuthenticationError) as refused:
        ask(safe, FILE_KEY[:-1])
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{safe.http_port}/health", timeout=CALL_S)
    others = ssl.create_default_context(cafile=str(strangers / "ca.crt"))
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{safe.api}/health", timeout=CALL_S, verify=others)


def test_keys_are_replaced_without_a_restart(safe: SafeStack, key_file: Path) -> None:
    beside = key_file.with_suffix(".new")
    for text, good, bad in ((SECOND_KEY, SECOND_KEY, FILE_KEY), (FILE_KEY, FILE_KEY, SECOND_KEY)):
        beside.write_text(text + "\n")
        beside.replace(key_file)
        until(partial(opens, safe, good))
        assert status(safe, bad) == 401
        assert status(safe, VARIABLE_KEY) == 200


def opens(safe: SafeStack, key: str) -> bool:
    return status(safe, key) == 200


def status(safe: SafeStack, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{safe.api}/v1/models", headers=headers, timeout=CALL_S).status_code


def test_same_root_only_a_key_is_not_told_how_anothers_prompt_begins(safe: SafeStack) -> None:
    prompt = [*range(100, 200)]
    read = [cached(safe, key, prompt) for key in (FILE_KEY, FILE_KEY, VARIABLE_KEY, VARIABLE_KEY)]
    assert read[0] == read[2] == 0
    assert read[1] == read[3] > 0
    salted = [cached(safe, FILE_KEY, prompt, "one's"), cached(safe, VARIABLE_KEY, prompt, "one's")]
    assert salted == [0, 0]
    assert cached(safe, FILE_KEY, prompt, "one's") == read[1]


def cached(safe: SafeStack, key: str, prompt: list[int], salt: str | None = None) -> int:
    """Send a prompt, and return the number of its tokens that were cached."""
    extra = {} if salt is None else {"cache_salt": salt}
    with client(safe, key) as asked:
        model = asked.models.list().data[0].id
        reply = asked.completions.create(model=model, prompt=prompt, max_tokens=1, extra_body=extra)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0


def test_the_pages_are_on_their_own_port_alone(safe: SafeStack) -> None:
    headers = {"Authorization": f"Bearer {FILE_KEY}"}
    for path in ("/metrics", "/rooms"):
        assert httpx.get(f"{safe.url}{path}", timeout=CALL_S).status_code == 200
        assert httpx.get(f"{safe.api}{path}", headers=headers, timeout=CALL_S).status_code == 404
        assert httpx.get(f"{safe.api}{path}", timeout=CALL_S).status_code == 401
    assert httpx.get(f"{safe.url}/v1/models", headers=headers, timeout=CALL_S).status_code == 404
    told = httpx.get(f"{safe.api}/ready", timeout=CALL_S).json()
    assert told == {"status": "ok", "problems": []}
    assert httpx.get(f"{safe.api}/ready", headers=headers, timeout=CALL_S).json() == told, "one of two keys"
    assert len(httpx.get(f"{safe.url}/ready", timeout=CALL_S).json()["workers"]) == 2


def test_a_body_over_the_limit_is_413_however_it_is_sent(safe: SafeStack) -> None:
    headers = {"Authorization": f"Bearer {FILE_KEY}", "Content-Type": "application/json"}
    piece = b'{"prompt": "' + b"a" * BODY_MAX
    for content in (piece, iter([piece[:1000], piece[1000:]])):  # with its length, and in chunks without
        reply = httpx.post(f"{safe.api}/v1/completions", headers=headers, content=content, timeout=CALL_S)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"


async def test_a_worker_without_a_certificate_of_ours_and_of_its_side_cannot_register(
    safe: SafeStack, ours: Path, strangers: Path
) -> None:
    address = f"127.0.0.1:{safe.grpc_port}"
    registration = workers_pb2.RegisterRequest(
        worker=rooms_pb2.Peer(name="intruder", incarnation=99, address="127.0.0.1:1"),
        side=rooms_pb2.SIDE_PREFILL,
    )
    mixed = ours / "ca.crt", strangers / "prefill.key", strangers / "prefill.crt"
    ca, key, cert = (path.read_bytes() for path in mixed)
    name = [("grpc.ssl_target_name_override", ServiceRole.BOOTSTRAP.tls_name)]
    for channel, told in (
        (grpc.aio.insecure_channel(address), "bootstrap unreachable"),
        (grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), name), "bootstrap unreachable"),
        (
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), name),
            "bootstrap unreachable",
        ),
        (
            open_channel(address, ServiceRole.BOOTSTRAP, Identity(of(strangers, "prefill"))),
            "bootstrap unreachable",
        ),
        (
            open_channel(address, ServiceRole.BOOTSTRAP, Identity(of(ours, "decode"))),
            "refused by the bootstrap",
        ),
        (
            open_channel(address, ServiceRole.BOOTSTRAP, Identity(of(ours, "bootstrap"))),
            "refused by the bootstrap",
        ),
    ):
        keeper = LeaseKeeper(channel, registration, lambda _: None, lambda _: None)
        running = asyncio.create_task(keeper.run())
        async with asyncio.timeout(CALL_S):
            while not (keeper.problem or "").startswith(told):
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await channel.close()
    listed = httpx.get(f"{safe.url}/ready", timeout=CALL_S).json()["workers"]
    assert {each["name"] for each in listed} == {"prefill-0", "decode-0"}


async def test_nobody_else_reads_a_destination_or_opens_a_room(
    safe: SafeStack, ours: Path, strangers: Path
) -> None:
    ca = (ours / "ca.crt").read_bytes()
    prefill, decode = safe.incarnation("prefill-0"), safe.incarnation("decode-0")

    async def ended(channel: grpc.aio.Channel, side: ServiceRole) -> set[str]:
        """Return how each relevant call ends."""
        if side is ServiceRole.PREFILL:
            handover = inference_pb2_grpc.HandoverServiceStub(channel)
            calls = [
                handover.HandOver(timeout=CALL_S).read(),
                inference_pb2_grpc.PrefillServiceStub(channel)
                .RunRoom(inference_pb2.RunRoomRequest(room=1, incarnation=prefill), timeout=CALL_S)
                .read(),
            ]
        elif side is ServiceRole.DECODE:
            request = inference_pb2.StreamRoomRequest(room=1, incarnation=decode)
            stub = inference_pb2_grpc.DecodeServiceStub(channel)
            calls = [stub.StreamRoom(request, timeout=CALL_S).read()]
        else:
            rooms = rooms_pb2_grpc.RoomServiceStub(channel)
            calls = [
                rooms.OpenRoom(rooms_pb2.OpenRoomRequest(prompt_tokens=1, tokens=2), timeout=CALL_S),
                rooms.GetRoom(rooms_pb2.GetRoomRequest(room=1), timeout=CALL_S),
                rooms.ListRooms(rooms_pb2.ListRoomsRequest(), timeout=CALL_S),
                rooms.WatchRoom(rooms_pb2.WatchRoomRequest(room=1), timeout=CALL_S).read(),
            ]
        codes = set()
        for call in calls:
            try:
                await call
                codes.add("OK")
            except grpc.aio.AioRpcError as error:
                codes.add(error.code().name)
        return codes

    addresses = {
        ServiceRole.BOOTSTRAP: f"127.0.0.1:{safe.grpc_port}",
        ServiceRole.PREFILL: safe.address("prefill-0"),
        ServiceRole.DECODE: safe.address("decode-0"),
    }
    wrong = {ServiceRole.BOOTSTRAP: "decode", ServiceRole.PREFILL: "prefill", ServiceRole.DECODE: "prefill"}
    foreign = (strangers / "bootstrap.key").read_bytes(), (strangers / "bootstrap.crt").read_bytes()
    for side, address in addresses.items():
        name = [("grpc.ssl_target_name_override", side.tls_name)]
        for channel, code in (
            (grpc.aio.insecure_channel(address), "UNAVAILABLE"),
            (grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), name), "UNAVAILABLE"),
            (
                grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, *foreign), name),
                "UNAVAILABLE",
            ),
            (open_channel(address, side, Identity(of(ours, wrong[side]))), "PERMISSION_DENIED"),
        ):
            assert await ended(channel, side) == {code}, (side, code)
            await channel.close()


async def test_whoever_started_a_worker_reports_its_exit_with_its_certificate(
    safe: SafeStack, ours: Path
) -> None:
    addresses = [f"127.0.0.1:{safe.grpc_port}"]
    await reporter(addresses, of(ours, "decode"))("nobody", 1, b"")
    with pytest.raises(RemoteError):
        await reporter(addresses, None)("nobody", 1, b"")


async def test_no_certificate_has_a_worker_taken_for_gone_that_lives(safe: SafeStack, ours: Path) -> None:
    """Neither another worker's certificate nor that of the stack's starter can do so."""
    service, incarnation = safe.services["prefill-0"], safe.incarnation("prefill-0")
    exited = workers_pb2.ReportExitRequest(name="prefill-0", pid=service.process.pid)
    leave = workers_pb2.LeaveRequest(incarnation=incarnation, credential=b"x" * 32)
    for party, kinds in (
        (ServiceRole.PREFILL, ("NotProven", "NotProven")),
        (ServiceRole.BOOTSTRAP, ("NotProven", "NotAdmitted")),
    ):
        channel = open_channel(
            f"127.0.0.1:{safe.grpc_port}", ServiceRole.BOOTSTRAP, Identity(of(ours, party))
        )
        registry = workers_pb2_grpc.WorkerRegistryStub(channel)
        for asked, kind in zip((registry.ReportExit(exited), registry.Leave(leave)), kinds, strict=True):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asked
            assert remote_error(refused.value).kind == kind
        await channel.close()
    assert safe.incarnation("prefill-0") == incarnation
    ask(safe, VARIABLE_KEY)


def test_a_worker_process_without_certificates_stays_outside(safe: SafeStack, ours: Path) -> None:
    intruder = safe.start_worker("decode", "intruder")
    try:
        until(lambda: "bootstrap unreachable" in ready(intruder.http))
        workers = httpx.get(f"{safe.url}/ready", timeout=CALL_S).json()["workers"]
        assert {each["name"] for each in workers} == {"prefill-0", "decode-0"}
        ask(safe, VARIABLE_KEY)
    finally:
        intruder.kill()
        del safe.services["intruder"]


def ready(http: str) -> str:
    try:
        return httpx.get(f"{http}/ready", timeout=CALL_S).text
    except httpx.TransportError:
        return ""


def test_nothing_secret_is_in_logs_metrics_timelines_or_command_lines(
    safe: SafeStack, ours: Path, key_file: Path
) -> None:
    """This runs after all tests above at level debug: good and bad keys, a rotation, and refused
    certificates."""
    ask(safe, FILE_KEY)
    secrets = [FILE_KEY, FILE_KEY[:-1], SECOND_KEY, VARIABLE_KEY, HF_TOKEN]
    for path in ours.glob("*.key"):
        secrets += [line for line in path.read_text().splitlines() if not line.startswith("-----")]
    said = {f"the log of {name}": service.log.read_text() for name, service in safe.services.items()}
    for name, service in safe.services.items():
        said[f"the metrics of {name}"] = httpx.get(f"{service.http}/metrics", timeout=CALL_S).text
        process = psutil.Process(service.process.pid)
        for each in (process, *process.children(recursive=True)):
            said[f"the command line of {name} ({each.pid})"] = " ".join(each.cmdline())
    rooms = httpx.get(f"{safe.url}/rooms?limit=1000", timeout=CALL_S).json()["rooms"]
    assert rooms
    said["the list of rooms"] = json.dumps(rooms)
    for page in ("/live", "/workers", "/requests", "/ready"):
        said[page] = httpx.get(f"{safe.url}{page}", timeout=CALL_S).text
    for room in rooms:
        said[f"the timeline of {room['id']}"] = httpx.get(
            f"{safe.url}/rooms/{room['id']}", timeout=CALL_S
        ).text
    assert "api-key-file" in said[f"the command line of bootstrap ({safe.services['bootstrap'].process.pid})"]
    for where, text in said.items():
        assert text, where
        assert [secret for secret in secrets if secret in text] == [], where
