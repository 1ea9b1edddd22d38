"""Settings of the router (bootstrap)."""

from dataclasses import dataclass
from typing import ClassVar, Final

from baton.api.tools.formats.output_formats import AUTO, NONE, REASONING_FORMATS, format_names
from baton.rooms.request import LOGPROBS_MAX
from baton.runtime.errors import SettingsError
from baton.runtime.model_options import GenerationConfig
from baton.runtime.service_settings import HOST_OR_NONE, RUN_TOKEN, ServiceSettings
from baton.runtime.setting_kinds import (
    ADDRESSES,
    DURATION_MS,
    FILE,
    HEADER,
    HOST,
    HOST_NAMES,
    ORIGINS,
    PORT,
    POSITIVE,
    SIZE,
    SWITCH,
    TEXT,
    choices,
    number,
    optional,
)
from baton.runtime.settings import setting
from baton.runtime.tls_files import TlsFiles, tls_files
from baton.web.api_keys import API_KEYS

GENERATION_CONFIG: Final = choices(*(each.value for each in GenerationConfig))
REASONING_PARSER: Final = choices(AUTO, NONE, *format_names(REASONING_FORMATS))
ADMIN_PORT: Final = optional(PORT, None)
DURATION_MS_OR_NONE: Final = optional(DURATION_MS, None)
NO_ADDRESSES: Final[tuple[str, ...]] = ()
ADDRESSES_OR_NONE: Final = optional(ADDRESSES, NO_ADDRESSES)
LOOPBACK: Final = "127.0.0.1"
CONNECTIONS: Final = number(16, 1_000_000)
ROOMS_KEPT: Final = number(1, 100_000)
LOGPROBS: Final = number(-1, LOGPROBS_MAX)


@dataclass(frozen=True, kw_only=True)
class BootstrapSettings(ServiceSettings):
    """Settings of the router (bootstrap). Sizes are in bytes, times in milliseconds."""

    role: ClassVar[str] = "bootstrap"

    model: str = setting(
        "demo", "A model directory, which may lack weights, a GGUF file, or the word demo.", TEXT
    )
    served_model_name: str = setting(
        "", "Names that clients ask for, by commas (not given: the model's own name).", TEXT
    )
    generation_config: str = setting(
        GenerationConfig.AUTO.value,
        "How tokens are drawn where a request does not say it: as the model's generation_config.json"
        " recommends (auto), or as the model computes them (none).",
        GENERATION_CONFIG,
    )
    tool_call_parser: str = setting(
        AUTO,
        "How calls of tools are read from answers: a name, or a file with a response template (auto: by the"
        " model's own, else as its chat template writes them, else by its type).",
        TEXT,
    )
    reasoning_parser: str = setting(
        AUTO,
        "How reasoning is told apart from the answer (auto: as above; none: it is part of the answer).",
        REASONING_PARSER,
    )
    describe_tools: bool = setting(
        True,
        "If a model's chat template knows no tools, describe them in the system message (false: refuse"
        " requests with tools).",
        SWITCH,
        former_name="tell_tools",
    )
    trust_request_chat_template: bool = setting(
        False,
        "Take chat templates that requests bring, for callers that are trusted: they are programs, in a"
        " sandbox that bounds their loops and what they write.",
        SWITCH,
    )
    max_logprobs: int = setting(
        20,
        "Most log-probabilities that a request may ask for beside each token's own (-1: as many as the"
        " vocabulary has, which are megabytes a token).",
        LOGPROBS,
    )
    clip_max_tokens: bool = setting(
        False,
        "Take max_tokens beyond what fits for as many as fit (false: such a request is refused).",
        SWITCH,
    )
    http_port: int = setting(8000, "Port of the OpenAI HTTP API (0: any free one).", PORT)
    reuse_port: bool = setting(
        False,
        "Share --http-port with other bootstraps on this machine (SO_REUSEPORT): the system gives each"
        " connection to one of them.",
        SWITCH,
    )
    grpc_port: int = setting(8100, "Port that workers register at (0: any free one).", PORT)
    grpc_host: str = setting("", "Address that --grpc-port is on (not given: --host).", HOST_OR_NONE)
    peer_bootstraps: tuple[str, ...] = setting(
        (),
        "The gRPC addresses of the stack's bootstraps, by commas: the pages for operators show the requests"
        " of all. A name may stand for several, as that of a headless Service does, and this bootstrap may be"
        " among them (not given: its own requests alone).",
        ADDRESSES_OR_NONE,
    )
    max_queue: int = setting(
        1024,
        "Most requests of one class and those above it waiting for a pair of workers; more get a 429. With"
        " lower classes and those that had a room, up to twice as many wait.",
        POSITIVE,
    )
    queue_timeout_ms: int = setting(
        60_000,
        "Longest wait of a request for a pair of workers. One whose room failed may wait for all its time.",
        DURATION_MS,
    )
    max_wait_ms: int | None = setting(
        None,
        "Turn away at once, with a 429, a request that would wait longer for a pair of workers, by the work"
        " ahead of it and the pace of late (not given: longer than two thirds of --queue-timeout-ms).",
        DURATION_MS_OR_NONE,
    )
    request_timeout_ms: int = setting(
        600_000, "Longest that one request may take once it has its workers.", DURATION_MS
    )
    room_attempts: int = setting(
        6,
        "Most rooms in a row that one request gets without getting any further: it goes on in a new one when"
        " a worker fails it.",
        POSITIVE,
    )
    retry_wait_ms: int | None = setting(
        None,
        "Longest wait of a request whose room failed for a worker to be ready, where none of a side is (not"
        " given: as long as the request may take).",
        DURATION_MS_OR_NONE,
    )
    lease_ms: int = setting(3_000, "A worker that is silent for this long is taken for lost.", DURATION_MS)
    rooms_kept: int = setting(1024, "Finished rooms whose timelines are kept.", ROOMS_KEPT)
    failed_rooms_kept: int = setting(4096, "Failed rooms whose timelines are kept.", ROOMS_KEPT)
    responses_kept: int = setting(
        1024,
        "Answers of /v1/responses that are kept, with what they answer, so that later requests can name them"
        " (0: none).",
        number(0, 100_000),
    )
    responses_kept_bytes: int = setting(
        64 * 2**20,
        "Most memory for them; the one used longest ago goes first, of the API key that has most.",
        SIZE,
    )
    reasoning_key_file: str = setting(
        "",
        "File whose content signs the reasoning that clients carry (reasoning.encrypted_content) and the ids"
        " of events; the same for all bootstraps (not given: BATON_REASONING_KEY, else a key is drawn at each"
        " start).",
        TEXT,
        former_name="thoughts_key_file",
    )
    reasoning_key: str = setting(
        "",
        "The same key without a file. `baton serve` draws one, so that streams can be continued after its"
        " bootstrap was restarted.",
        RUN_TOKEN,
        secret=True,
    )
    max_body_bytes: int = setting(4 * 2**20, "Largest request body.", SIZE)
    rate_limit: int = setting(
        0, "Most requests a second of one API key, or of one address without keys (0: any).", number(0, 10**6)
    )
    min_priority: int = setting(
        0,
        "Lowest priority that a request may ask for, which is served first (0: nobody comes before those that"
        " ask for none).",
        number(-(2**31), 0),
    )
    tenant_header: str = setting(
        "",
        "Header that names the tenant in whose share a request waits, where a gateway sets it for all of its"
        " callers (not given: the API key is the tenant, or the address without keys).",
        HEADER,
    )
    api_key_file: str = setting(
        "",
        "File of API keys, one a line, # for comments; read again when it changes. BATON_API_KEYS may hold"
        " some too, separated by commas. Neither: whoever reaches the port may ask.",
        FILE,
    )
    api_keys: tuple[str, ...] = setting((), "API keys.", API_KEYS, secret=True)
    share_prefix_cache: bool = setting(
        False,
        "Share prefix caches between API keys, so that a prompt computed for one is not computed again for"
        " another: a caller then learns, by a sooner answer and cached_tokens, how another's prompt begins"
        " (false: with more than one key, each has a cache of its own).",
        SWITCH,
    )
    admin_api_key_file: str = setting(
        "",
        "File of admin keys, one a line, as --api-key-file. They alone open /metrics, /rooms, /requests,"
        " /workers, /live and /ui, on either port, and are API keys, too. BATON_ADMIN_API_KEYS may hold some"
        " (neither: one API key opens these pages, and of several none).",
        FILE,
    )
    admin_api_keys: tuple[str, ...] = setting((), "Admin keys.", API_KEYS, secret=True)
    open_admin: bool = setting(
        False,
        "Open the pages for operators on the API's port to every API key: each then reads which requests the"
        " others make (false: with more than one key, to admin keys alone).",
        SWITCH,
    )
    http_keep_alive_ms: int = setting(
        120_000,
        "How long an HTTP connection may rest between two requests. Longer than what is in front of it keeps"
        " its own: nginx 60 s, and most cloud balancers.",
        DURATION_MS,
    )
    max_connections: int = setting(
        16_384,
        "Most HTTP connections at a time, of each port. More are let in as long as others can be closed that"
        " wait for their clients, of the address that has most.",
        CONNECTIONS,
    )
    http_tls_cert: str = setting(
        "", "Certificate (PEM) of the HTTP ports; with --http-tls-key (not given: plain HTTP).", TEXT
    )
    http_tls_key: str = setting("", "Private key (PEM) of --http-tls-cert.", TEXT)
    admin_port: int | None = setting(
        None,
        "Port of /metrics, /rooms, /requests, /workers, /live and /ui, apart from the API and without keys,"
        " or with admin keys if there are some (not given: on the API's port).",
        ADMIN_PORT,
    )
    admin_host: str = setting(LOOPBACK, "Address that --admin-port is on.", HOST)
    allowed_host: tuple[str, ...] = setting(
        (),
        "Names that requests may call the HTTP ports by, beside addresses and localhost (not given: any, but"
        " on a loopback without API keys, where a web page of another name could ask).",
        HOST_NAMES,
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origins of web pages that may ask the API from a browser and read its answers; *: of any (not given:"
        " none but the server's own).",
        ORIGINS,
    )
    log_prompts: bool = setting(
        False, "Write the beginning of each prompt and answer to the log, as users wrote them.", SWITCH
    )

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names by which clients may ask for the model. Empty for the model's own name."""
        return tuple(filter(None, (name.strip() for name in self.served_model_name.split(","))))

    @property
    def http_tls(self) -> TlsFiles | None:
        """Certificate and key of both HTTP ports; None for plain HTTP."""
        return tls_files(self.http_tls_cert, self.http_tls_key, flags="--http-tls")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.grpc_host:
            object.__setattr__(self, "grpc_host", self.host)
        tls_files(self.http_tls_cert, self.http_tls_key, flags="--http-tls")
        if len(set(self.served_names)) < len(self.served_names):
            raise SettingsError(f"--served-model-name {self.served_model_name}: a name is there twice")
        if self.open_admin and (self.admin_api_keys or self.admin_api_key_file):
            raise SettingsError("--open-admin and admin keys: the pages are for every API key, or for admins")
        if self.open_admin and self.admin_port is not None:
            raise SettingsError(
                "--open-admin and --admin-port: the pages are on the API's port, or on theirs"
            )
        if self.admin_host != LOOPBACK and self.admin_port is None:
            raise SettingsError(f"--admin-host {self.admin_host} without --admin-port: there is no such port")
