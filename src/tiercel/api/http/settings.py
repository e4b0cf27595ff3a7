"""The server's settings and limits: one frozen value, checked as a whole. Knows no engine and no command line.

Each field is a row of the table of options: `base.options` says what follows from one, and how to add one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tiercel.api.http.auth import read_key_file
from tiercel.api.http.limits import RequestLimits
from tiercel.base import env
from tiercel.base.errors import ConfigError
from tiercel.base.options import Option, option, options_of, parse_float, parse_list, parse_object, parse_template
from tiercel.base.units import parse_bytes, parse_int_human
from tiercel.text.parsers.registry import check_names

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
FINGERPRINT_MODES: Final = ("full", "hash", "custom", "none")
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_ROOT_PATH: Final = re.compile(r"(/[\w.~\-]+)*", re.ASCII)
_ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.\-]*://[^/\s*]+", re.ASCII | re.IGNORECASE)
_UDS_BYTES_MAX: Final = 107  # of a socket's address on Linux, but for its last zero
# Keywords of `ChatTemplate.render` itself; each has a field of a request.
NOT_TEMPLATE_KWARGS: Final = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
_KEYS_FROM: Final = ("TIERCEL_API_KEY", "VLLM_API_KEY")


def parse_port(text: str) -> int:
    """Read a port: 1024 to 65535, or 0 for any free one.

    Raises:
        ConfigError: `text` is none of these.
    """
    port = parse_int_human(text)
    if port != 0 and not 1024 <= port <= 65535:
        raise ConfigError(f"got {port}; need 1024 to 65535, or 0 for any free port")
    return port


def _parse_tools(text: str) -> str:
    check_names(text, "auto")
    return text


def _parse_reasoning(text: str) -> str:
    check_names("auto", text)
    return text


def _one_key(text: str) -> tuple[str, ...]:
    return (text,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(RequestLimits):
    """What one HTTP server is told; each row says what it does, and why its default is what it is."""

    host: str = option(
        "127.0.0.1",
        metavar="HOST",
        group="server",
        is_common=True,
        help="the address to listen on; 0.0.0.0 is all of them",
        why="nobody else gets in",
    )
    port: int = option(
        8000,
        parse=parse_port,
        least=0,
        metavar="PORT",
        group="server",
        is_common=True,
        help="the port to listen on; 0 takes any free one",
        why="vLLM's",
    )
    served_names: tuple[str, ...] = option(
        (),
        flag="--served-model-name",
        many="words",
        metavar="NAME",
        group="server",
        is_common=True,
        help="names clients may use; answers carry the first",
        why="the model's own name",
    )
    api_keys: tuple[str, ...] = option(
        (),
        flag="--api-key",
        many="repeat",
        is_shown=False,
        metavar="KEY",
        group="server",
        is_common=True,
        env=tuple((name, _one_key) for name in _KEYS_FROM),
        help="a key that opens every route; repeatable. Those of the environment, which others cannot see, count too",
        why="on this machine only, nobody is kept out",
    )
    file_keys: tuple[str, ...] = option(
        (),
        flag="--api-key-file",
        parse=read_key_file,
        many="list",
        is_shown=False,
        metavar="FILE",
        group="server",
        help="a file of more keys, one a line",
        why="keys in the environment need none",
    )
    is_insecure: bool = option(
        False,
        flag="--insecure",
        parse=None,
        group="server",
        help="listen beyond this machine without a key",
        why="whoever finds an open server uses it",
    )
    has_open_metrics: bool = option(
        False,
        flag="--open-metrics",
        parse=None,
        group="server",
        help="let /metrics be read without a key, by a scraper that has none",
        why="it tells how much is asked, and when",
    )
    has_page: bool = option(
        True,
        flag="--ui",
        parse=None,
        group="server",
        help="serve a page at / to chat with the model and to look at the engine",
        why="it fetches nothing from elsewhere",
    )
    has_docs: bool = option(
        True,
        flag="--disable-fastapi-docs",
        is_inverse=True,
        parse=None,
        group="server",
        help="serve no /docs and no /openapi.json",
        why="they describe what is there, and fetch nothing from elsewhere",
    )
    has_tokenizer_info: bool = option(
        False,
        flag="--enable-tokenizer-info-endpoint",
        parse=None,
        group="server",
        help="let /tokenizer_info tell all there is to know of the tokenizer",
        why="it holds the whole chat template",
    )
    uds: str | None = option(
        None,
        metavar="PATH",
        group="server",
        help="listen on a Unix socket at this path, which only this user may open, and on no port",
        why="a port is what clients ask",
    )
    root_path: str = option(
        "",
        metavar="PREFIX",
        group="server",
        help="the prefix a proxy serves this server under, as /models/a; taken off where it is still there",
        why="it is served at its own root",
    )
    middleware: tuple[str, ...] = option(
        (),
        many="repeat",
        metavar="NAME",
        group="server",
        help="an ASGI class or async function (request, call_next) around the routes, as package.module.name; "
        "repeatable, the first is the outermost",
        why="none but what is built in",
    )
    shutdown_s: float = option(
        30.0,
        flag="--shutdown-timeout",
        parse=parse_float,
        least=0.0,
        metavar="S",
        group="server",
        help="seconds that running requests may go on after SIGTERM",
        why="what orchestrators grant",
    )
    n_threads: int = option(
        2,
        flag="--renderer-num-workers",
        parse=parse_int_human,
        least=1,
        metavar="N",
        group="server",
        help="threads for templates and tokenising, off the event loop",
        why="more would only take cores from the model",
    )
    ssl_certfile: str | None = option(
        None,
        metavar="FILE",
        group="tls",
        help="serve TLS with this certificate's chain, in PEM",
        why="on this machine nobody listens in",
    )
    ssl_keyfile: str | None = option(
        None,
        metavar="FILE",
        group="tls",
        help="the certificate's key, if it is in another file; one that is not encrypted",
        why="it is in the certificate's file",
    )
    ssl_ca_certs: str | None = option(
        None,
        metavar="FILE",
        group="tls",
        help="who may sign the certificates of clients, in PEM",
        why="clients show none",
    )
    ssl_cert_reqs: int = option(
        0,
        parse=parse_int_human,
        least=0,
        most=2,
        metavar="N",
        group="tls",
        help="0: clients show no certificate; 1: they may; 2: they must",
        why="keys tell clients apart",
    )
    ssl_ciphers: str | None = option(
        None,
        metavar="LIST",
        group="tls",
        help="ciphers of TLS 1.2, as OpenSSL lists them",
        why="the system's",
    )
    enable_ssl_refresh: bool = option(
        False,
        parse=None,
        group="tls",
        help="read the files again when they change; no connection is dropped",
        why="whoever renews them says so",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        parse=parse_list,
        many="list",
        metavar="JSON",
        group="origins",
        help="pages of these origins may ask from their readers' browsers, as '[\"https://app.example\"]'; * is every "
        "page of the web",
        why="any page could use a server on its reader's machine",
    )
    allowed_methods: tuple[str, ...] = option(
        ("*",),
        parse=parse_list,
        many="list",
        metavar="JSON",
        group="origins",
        help="the methods that they may use",
        why="the origins were chosen",
    )
    allowed_headers: tuple[str, ...] = option(
        ("*",),
        parse=parse_list,
        many="list",
        metavar="JSON",
        group="origins",
        help="the headers that they may send",
        why="the origins were chosen",
    )
    allow_credentials: bool = option(
        False,
        parse=None,
        group="origins",
        help="they may send cookies, which a proxy may read; not with every page of the web",
        why="keys are in a header",
    )
    response_role: str = option(
        "assistant",
        metavar="ROLE",
        group="answers",
        help="who answers a chat",
        why="what clients expect",
    )
    enable_force_include_usage: bool = option(
        False,
        parse=None,
        group="answers",
        help="every stream tells its usage, in each chunk, as if asked to",
        why="clients ask for it",
    )
    enable_per_request_metrics: bool = option(
        False,
        parse=None,
        group="answers",
        help="answers of one sequence have `metrics`: where their time went",
        why="clients measure themselves",
    )
    return_tokens_as_token_ids: bool = option(
        False,
        parse=None,
        group="answers",
        help="write tokens as token_id:N where a request does not say",
        why="texts are what most read",
    )
    fingerprint_mode: str = option(
        "full",
        choices=FINGERPRINT_MODES,
        metavar="MODE",
        group="answers",
        help="what system_fingerprint is: name, version and digest of model and settings; the digest; "
        "--fingerprint-value; nothing",
        why="who compares answers needs all of it",
    )
    fingerprint: str | None = option(
        None,
        flag="--fingerprint-value",
        metavar="TEXT",
        group="answers",
        help="the fingerprint of mode custom",
        why="the mode is full",
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False,
        parse=None,
        group="answers",
        help="do not show the model tools that it must not call",
        why="they may still be talked about, and the prefix stays the same",
    )
    chat_template: str | None = option(
        None,
        parse=parse_template,
        metavar="FILE|TEXT",
        group="chat",
        help="write prompts of chats by this template, in a file or as it stands, instead of the model's",
        why="a model brings its own",
    )
    trusts_request_template: bool = option(
        False,
        flag="--trust-request-chat-template",
        parse=None,
        group="chat",
        help="run chat templates that requests bring along, in the sandbox of the model's",
        why="a template is a program, and a request's is a stranger's",
    )
    default_chat_template_kwargs: Mapping[str, Any] = option(
        {},
        parse=parse_object,
        keys=(),
        metavar="JSON",
        group="chat",
        help="variables of the template that a request may leave out, as in '{\"enable_thinking\": false}'",
        why="the template's own defaults",
    )
    tool_call_parser: str = option(
        "auto",
        parse=_parse_tools,
        metavar="NAME",
        group="chat",
        help="how the model writes tool calls, as in hermes; none: not at all",
        why="found in its template and vocabulary",
    )
    reasoning_parser: str = option(
        "auto",
        parse=_parse_reasoning,
        metavar="NAME",
        group="chat",
        help="how the model marks its reasoning, as in qwen3; none: not at all",
        why="found in its template and vocabulary",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        metavar="URL",
        group="logs",
        help="send a span for each request to this OpenTelemetry collector, as http://collector:4318/v1/traces",
        why="nothing is sent anywhere unasked",
    )
    has_stats_log: bool = option(
        True,
        flag="--disable-log-stats",
        is_inverse=True,
        parse=None,
        group="logs",
        help="do not log throughput and load",
        why="one line every ten seconds, and none while idle",
    )
    stats_interval_s: float = option(
        10.0,
        flag="--log-stats-interval",
        parse=parse_float,
        least=0.0,
        metavar="S",
        group="logs",
        env=(("VLLM_LOG_STATS_INTERVAL", parse_float),),
        help="seconds between two lines of the log that say how fast the engine is; 0: none",
        why="vLLM's",
    )
    log_level: str = option(
        "info",
        flag="--uvicorn-log-level",
        choices=LOG_LEVELS,
        aliases={"trace": "debug"},
        env=((env.LOG.name, str.lower), ("VLLM_LOGGING_LEVEL", str.lower)),
        metavar="LEVEL",
        group="logs",
        help="the least level that is logged",
        why="requests and load are told, prompts are not",
    )
    log_format: str = option(
        "text",
        choices=("text", "json"),
        metavar="FORMAT",
        group="logs",
        help="json: a line is an object, with the request's id",
        why="people read it",
    )
    log_config_file: str | None = option(
        None,
        env=(("VLLM_LOGGING_CONFIG_PATH", str),),
        metavar="FILE",
        group="logs",
        help="log as this file says, JSON for Python's logging.config.dictConfig, whatever the level and format are",
        why="one line each on standard error",
    )
    enable_log_requests: bool = option(
        False,
        parse=None,
        group="logs",
        help="log each request's id and parameters; at level debug its prompt too",
        why="what people ask is theirs",
    )
    enable_log_outputs: bool = option(
        False,
        parse=None,
        group="logs",
        help="log each output; needs --enable-log-requests",
        why="what people are answered is theirs",
    )
    enable_log_deltas: bool = option(
        False,
        parse=None,
        group="logs",
        help="log each piece of a stream as well; needs --enable-log-outputs",
        why="the whole output has them all",
    )
    max_log_len: int | None = option(
        None,
        parse=parse_int_human,
        least=0,
        metavar="N",
        group="logs",
        help="the most characters, and token ids, of a prompt or output in a line",
        why="all of it was asked for",
    )
    has_access_log: bool = option(
        True,
        flag="--disable-uvicorn-access-log",
        is_inverse=True,
        parse=None,
        group="logs",
        help="do not log a line for each answer",
        why="who asked what is the first question",
    )
    unlogged_paths: tuple[str, ...] = option(
        ("/health", "/ping", "/ready", "/metrics"),
        flag="--disable-access-log-for-endpoints",
        parse=parse_list,
        many="list",
        metavar="LIST",
        group="logs",
        help="log no answers of these paths, as in /health,/metrics",
        why="probers ask them all day",
    )
    body_bytes_max: int = option(
        64 << 20,
        parse=parse_bytes,
        least=1,
        metavar="SIZE",
        group="limits",
        help="the most bytes of a request",
        why="a long conversation with its tools is far below",
    )
    header_bytes_max: int = option(
        64 << 10,
        flag="--h11-max-incomplete-event-size",
        parse=parse_bytes,
        least=1024,
        metavar="SIZE",
        group="limits",
        help="the most bytes of a request's headers",
        why="no client sends more",
    )
    n_headers_max: int = option(
        256,
        flag="--h11-max-header-count",
        parse=parse_int_human,
        least=1,
        metavar="N",
        group="limits",
        help="the most headers of a request",
        why="vLLM's",
    )
    read_stall_s: float = option(
        60.0,
        parse=parse_float,
        least=0.0,
        metavar="S",
        group="limits",
        help="seconds for a request's head, and between two pieces of its body, after which it is given up",
        why="a slow line is faster",
    )
    write_stall_s: float = option(
        60.0,
        parse=parse_float,
        least=0.0,
        metavar="S",
        group="limits",
        help="seconds in which a reader takes nothing, after which its request ends",
        why="a reader that is there takes something",
    )
    thread_stall_s: float = option(
        120.0,
        parse=parse_float,
        least=0.0,
        metavar="S",
        group="limits",
        help="seconds without an answer of a thread, after which /health calls it dead",
        why="no step takes half of it",
    )
    keep_alive_s: int = option(
        5,
        flag="--timeout-keep-alive",
        parse=parse_int_human,
        least=0,
        metavar="S",
        group="limits",
        env=(("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", parse_int_human),),
        help="seconds that an idle connection stays open",
        why="uvicorn's, and vLLM's",
    )
    n_open_max: int = option(
        1024,
        parse=parse_int_human,
        least=0,
        metavar="N",
        group="limits",
        help="requests under way, beyond which clients are told to come back",
        why="bounds bodies and threads; the engine's own queue has max_waiting",
    )
    n_connections_max: int = option(
        4096,
        parse=parse_int_human,
        least=1,
        metavar="N",
        group="limits",
        help="connections, beyond which clients are told to come back",
        why="each may hold a head and the beginning of a body",
    )
    n_stored_max: int = option(
        1000,
        flag="--max-stored-responses",
        parse=parse_int_human,
        least=0,
        metavar="N",
        group="limits",
        help="answers of /v1/responses that are kept in memory to be asked for again, the oldest go first; 0: none",
        why="a working day's of a few people",
    )
    store_bytes_max: int = option(
        256 << 20,
        parse=parse_bytes,
        least=1,
        metavar="SIZE",
        group="limits",
        help="the most bytes of them and their conversations, as JSON",
        why="some 2,500 conversations of 100 KB",
    )
    store_ttl_s: float = option(
        86_400.0,
        parse=parse_float,
        least=0.001,
        metavar="S",
        group="limits",
        help="seconds that one is kept",
        why="24 h: a working day's conversations go on, nobody's words stay for long",
    )
    n_background_max: int = option(
        128,
        parse=parse_int_human,
        least=1,
        metavar="N",
        group="limits",
        help="responses that run with nobody waiting; more are told to come back",
        why="as many as are worth keeping in the queue",
    )
    event_log_bytes_max: int = option(
        16 << 20,
        parse=parse_bytes,
        least=1,
        metavar="SIZE",
        group="limits",
        help="the most bytes of events of one response in the background, then the oldest go",
        why="some 60,000 tokens",
    )

    def __post_init__(self) -> None:
        for row in options_of(ServerSettings):
            row.check(getattr(self, row.name))
        if not self.served_names or not all(self.served_names):
            raise ConfigError("served_names: got none, or an empty one; at least one name is needed")
        if any(not key.strip() for key in self.keys):
            raise ConfigError("api_keys: got an empty key; some text is needed; leave it out")
        if self.uds is None and self.host not in LOOPBACK and not self.keys and not self.is_insecure:
            raise ConfigError(
                f"host: {self.host} lets other machines in, and there is no key; give one with --api-key or in "
                f"{_KEYS_FROM[0]}; or say --insecure if the network is closed"
            )
        check_names(self.tool_call_parser, self.reasoning_parser)
        for name in self.default_chat_template_kwargs:
            if name in NOT_TEMPLATE_KWARGS:
                raise ConfigError(
                    f"default_chat_template_kwargs: got {name!r}, a field of a request; variables of the template are "
                    "needed; leave it out"
                )
        self._check_address()
        self._check_tls()
        self._check_origins()
        self._check_answers()
        self._check_logs()

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that open routes."""
        return self.api_keys + self.file_keys

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.ssl_certfile is not None

    @property
    def model_id(self) -> str:
        """The name that answers carry."""
        return self.served_names[0]

    def _check_address(self) -> None:
        n_bytes = len((self.uds or "").encode())
        if self.uds is not None and not 0 < n_bytes <= _UDS_BYTES_MAX:
            raise ConfigError(
                f"uds: got a path of {n_bytes} bytes; 1 to {_UDS_BYTES_MAX} is what a socket's address holds; take a "
                "shorter one"
            )
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path: got {self.root_path!r}; a path such as /models/a is needed, without a / at its end"
            )

    def _check_tls(self) -> None:
        others = (self.ssl_keyfile, self.ssl_ca_certs, self.ssl_ciphers)
        if not self.has_tls and (any(others) or self.ssl_cert_reqs or self.enable_ssl_refresh):
            raise ConfigError(
                "ssl_certfile: got none, but other settings of TLS; name a certificate, or leave them out"
            )
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("ssl_ca_certs: got none; it is needed to check the certificates of clients")

    def _check_origins(self) -> None:
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: got {origin!r}; an origin such as https://app.example is needed, without a "
                    'path, or "*"'
                )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                'allow_credentials: got it with "*", which would let every page of the web act as its reader; name the '
                "origins"
            )

    def _check_answers(self) -> None:
        if (self.fingerprint_mode == "custom") != bool(self.fingerprint):
            raise ConfigError(
                f"fingerprint: got {self.fingerprint!r} with fingerprint_mode {self.fingerprint_mode}; some text is "
                "needed with custom, and none otherwise"
            )
        if not self.response_role.strip():
            raise ConfigError("response_role: it is empty; a role such as assistant is needed")

    def _check_logs(self) -> None:
        for name, needed in (
            ("enable_log_outputs", "enable_log_requests"),
            ("enable_log_deltas", "enable_log_outputs"),
        ):
            if getattr(self, name) and not getattr(self, needed):
                raise ConfigError(f"{name}: got it without {needed}, which is needed; set both")


def server_rows(*groups: str) -> tuple[Option, ...]:
    """Give the server's rows of some groups; of none: all."""
    rows = options_of(ServerSettings)
    return tuple(row for row in rows if not groups or row.group in groups)
