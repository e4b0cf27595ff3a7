"""The server's settings and limits: one frozen value, checked as a whole. Knows no engine and no command line."""

from dataclasses import dataclass, field
from typing import Final

from tiercel.base.errors import ConfigError
from tiercel.text.parsers.registry import check_names

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What one HTTP server is told.

    served_names         names clients may use; the first is the one that answers carry
    host, port           where to listen; port 0 takes any free one. Loopback: nobody else gets in by default
    api_keys             any of them opens every route; never printed
    is_insecure          listen beyond this machine without a key
    has_page             GET / is a page to chat with the model and to look at the engine
    has_open_metrics     /metrics answers without a key, for a scraper that has none
    shutdown_s           how long running requests may go on after SIGTERM; 30 s is what orchestrators grant
    body_bytes_max       64 MiB, of a request
    read_stall_s         60: a body that comes more slowly than this between two pieces is given up
    write_stall_s        60: a reader that takes nothing for so long loses its request
    thread_stall_s       120: a thread that has not answered for so long is dead to /health; no step takes half of it
    has_docs             /docs and /openapi.json are served
    has_tokenizer_info   /tokenizer_info is served: it tells all there is to know of the tokenizer
    keep_alive_s         5, idle, as uvicorn and vLLM
    header_bytes_max     64 KiB, of one request; n_headers_max 256
    n_outputs_max        128: `n` of a request, before anything is copied
    n_prompts_max        1024: prompts of one completion request, as vLLM
    n_open_max           1024: requests under way, beyond which they are told to come back; the engine's own queue is
                         bounded too (max_waiting), this bounds bodies and threads
    n_tools_max          128: tools of a request, and tools_bytes_max 1 MiB of them: all go through the template
    n_stored_max         1000: responses that are kept to be asked for again, the oldest go first; 0 keeps none
    store_bytes_max      256 MiB: of them and their conversations, as JSON; some 2,500 conversations of 100 KB
    store_ttl_s          24 h: how long one is kept; a working day's conversations go on, nobody's words stay for long
    n_background_max     128: responses that run with nobody waiting; more are told to come back
    event_log_bytes_max  16 MiB: events of one response in the background, some 60,000 tokens; then the oldest go
    tool_call_parser     how the model writes calls: "auto" finds it in the template and vocabulary, "none" has none
    reasoning_parser     the same for reasoning
    otlp_traces_endpoint where spans go, as http://collector:4318/v1/traces; None: no tracing
    stats_interval_s     10: between two lines of the log that say how fast the engine is; 0: none
    n_threads            2: for templates and tokenising, off the event loop; more would only take cores from the model
    """

    served_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    is_insecure: bool = False
    has_page: bool = True
    has_open_metrics: bool = False
    shutdown_s: float = 30.0
    body_bytes_max: int = 64 << 20
    read_stall_s: float = 60.0
    write_stall_s: float = 60.0
    thread_stall_s: float = 120.0
    has_docs: bool = True
    has_tokenizer_info: bool = False
    keep_alive_s: int = 5
    header_bytes_max: int = 64 << 10
    n_headers_max: int = 256
    n_outputs_max: int = 128
    n_prompts_max: int = 1024
    n_open_max: int = 1024
    n_tools_max: int = 128
    tools_bytes_max: int = 1 << 20
    n_stored_max: int = 1000
    store_bytes_max: int = 256 << 20
    store_ttl_s: float = 86_400.0
    n_background_max: int = 128
    event_log_bytes_max: int = 16 << 20
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    otlp_traces_endpoint: str | None = None
    stats_interval_s: float = 10.0
    n_threads: int = 2

    def __post_init__(self) -> None:
        if not self.served_names or not all(self.served_names):
            raise ConfigError("server.served_names: got none, or an empty one; at least one name is needed")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("server.api_keys: got an empty key; some text is needed; leave it out")
        if self.host not in LOOPBACK and not self.api_keys and not self.is_insecure:
            raise ConfigError(
                f"server.host: {self.host} lets other machines in, and there is no key; give an API key, or say that "
                "the network is closed (--insecure)"
            )
        check_names(self.tool_call_parser, self.reasoning_parser)
        if self.stats_interval_s < 0:
            raise ConfigError(f"server.stats_interval_s: got {self.stats_interval_s:g} s; 0 or more is needed")
        if self.n_stored_max < 0:
            raise ConfigError(f"server.n_stored_max: got {self.n_stored_max}; 0 or more is needed")
        for name in ("store_bytes_max", "store_ttl_s", "n_background_max", "event_log_bytes_max"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"server.{name}: got {getattr(self, name)}; more than 0 is needed")
        if self.shutdown_s < 0:
            raise ConfigError(f"server.shutdown_s: got {self.shutdown_s:g} s; 0 or more is needed")

    @property
    def model_id(self) -> str:
        """The name that answers carry."""
        return self.served_names[0]
