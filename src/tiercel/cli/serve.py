"""`tiercel serve`: a model behind OpenAI's HTTP routes. Checks its flags, finds the model, hands over to the server."""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiercel.base import env
from tiercel.base.config import engine_options
from tiercel.base.errors import ConfigError
from tiercel.base.units import parse_int_human
from tiercel.cli.options import ENGINE_OPTIONS, REMOVED_FLAGS, add_options, given_options, parse_float
from tiercel.cli.parsing import CommandParser, checked
from tiercel.cli.run import add_model_source, find_model
from tiercel.cli.run_request import RunRequest

if TYPE_CHECKING:
    from tiercel.api.http.facade import EngineFacade

_KEY_VARIABLES = ("TIERCEL_API_KEY", "VLLM_API_KEY")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What the command line asks of a server.

    `served_names`: the first is the one answers carry, all are accepted. `api_keys` is never printed. `port` 0 takes
    any free one. `shutdown_s`: how long requests may go on after SIGTERM. `engine_options` are `LLM`'s keywords.
    """

    model: str
    host: str
    port: int
    served_names: tuple[str, ...]
    shutdown_s: float
    engine_options: Mapping[str, Any]
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    is_insecure: bool = False
    has_page: bool = True
    has_open_metrics: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    otlp_traces_endpoint: str | None = None
    stats_interval_s: float = 10.0
    has_docs: bool = True
    has_tokenizer_info: bool = False
    n_stored_max: int = 1000


def configure(parser: CommandParser) -> None:
    """Give `parser` what `serve` takes."""
    parser.usage = "tiercel serve [MODEL] [--host HOST] [--port PORT] [flags]"
    parser.epilog = f"An API key may also come from {' or '.join(_KEY_VARIABLES)}, where other users cannot see it."
    parser.removed |= REMOVED_FLAGS | {
        "model": "removed for serve: write the model without a flag: tiercel serve MODEL"
    }
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, .gguf file, catalogue name or org/name")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: this machine only)")
    parser.add_argument("--port", type=checked(parse_port), default=8000, help="the port to listen on (default: 8000)")
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="a key clients must send; repeatable"
    )
    parser.add_argument("--insecure", action="store_true", help="listen beyond this machine without a key")
    parser.add_argument("--open-metrics", action="store_true", help="let /metrics be read without a key")
    parser.add_argument("--no-ui", action="store_true", help="do not show the built-in page at /")
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names clients may use; the first is told"
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=checked(parse_float),
        default=30.0,
        metavar="S",
        help="seconds that running requests may go on after SIGTERM (default: 30)",
    )
    parser.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="how the model writes tool calls, as in hermes; none; default: found in its template",
    )
    parser.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="accepted for vLLM's sake: it is always on"
    )
    parser.add_argument(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="how the model marks its reasoning, as in qwen3; none; default: found in its template",
    )
    parser.add_argument(
        "--otlp-traces-endpoint", metavar="URL", help="send a span for each request to this OpenTelemetry collector"
    )
    parser.add_argument(
        "--disable-log-stats", action="store_true", help="do not log throughput and load every ten seconds"
    )
    parser.add_argument("--disable-fastapi-docs", action="store_true", help="serve no /docs and no /openapi.json")
    parser.add_argument(
        "--enable-offline-docs", action="store_true", help="accepted for vLLM's sake: /docs fetches nothing"
    )
    parser.add_argument(
        "--enable-tokenizer-info-endpoint", action="store_true", help="let /tokenizer_info tell all of the tokenizer"
    )
    parser.add_argument(
        "--max-stored-responses",
        type=checked(parse_count),
        default=1000,
        metavar="N",
        help="answers of /v1/responses that are kept in memory to be asked for again (default: 1000; 0: none)",
    )
    add_model_source(parser)
    add_options(parser, ENGINE_OPTIONS, title="engine")


def execute(args: Any) -> int:
    """Serve until told to stop."""
    return start_server(read_config(args, os.environ)) or 0


def read_config(args: Any, environ: Mapping[str, str]) -> ServeConfig:
    """Check the flags and bring the model here.

    Raises:
        ConfigError: names without a model, or an address others can reach without a key.
    """
    if args.served_model_name and args.model is None:
        raise ConfigError(
            "serve: got --served-model-name without a model; need to know what has that name: serve MODEL"
        )
    if args.shutdown_timeout < 0:
        raise ConfigError(f"serve: --shutdown-timeout: got {args.shutdown_timeout:g} s; need 0 or more")
    _check_parsers(args.tool_call_parser, args.reasoning_parser)
    keys = (*args.api_key, *(environ[name] for name in _KEY_VARIABLES if environ.get(name)))
    if any(not key.strip() for key in keys):
        raise ConfigError("serve: --api-key: got an empty key; need some text")
    if args.host not in _LOOPBACK and not keys and not args.insecure:
        raise ConfigError(
            f"serve: --host {args.host} lets other machines in, and there is no key; need --api-key or "
            f"{_KEY_VARIABLES[0]}; or say --insecure if the network is closed"
        )
    if args.api_key:
        print(f"tiercel serve: other users can see --api-key; {_KEY_VARIABLES[0]} is not seen", file=sys.stderr)
    # Wrong values are told before anything is fetched or loaded.
    options = given_options(args, ENGINE_OPTIONS)
    engine_options(**options)
    found = find_model(RunRequest(args.model, None), offline=args.offline, revision=args.revision)
    return ServeConfig(
        model=str(found.path),
        host=args.host,
        port=args.port,
        served_names=tuple(args.served_model_name or (found.display_name,)),
        shutdown_s=args.shutdown_timeout,
        engine_options=options,
        api_keys=keys,
        is_insecure=args.insecure,
        has_page=not args.no_ui,
        has_open_metrics=args.open_metrics,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        stats_interval_s=0.0 if args.disable_log_stats else 10.0,
        has_docs=not args.disable_fastapi_docs,
        has_tokenizer_info=args.enable_tokenizer_info_endpoint,
        n_stored_max=args.max_stored_responses,
    )


def _check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Refuse a name of no parser before a model is fetched."""
    from tiercel.text.parsers.registry import check_names

    check_names(tool_call_parser, reasoning_parser)


def parse_count(text: str) -> int:
    """Read a number of things, none included.

    Raises:
        ConfigError: `text` is no number, or less than none.
    """
    n = parse_int_human(text)
    if n < 0:
        raise ConfigError(f"got {n}; need 0 or more")
    return n


def parse_port(text: str) -> int:
    """Read a port: 1024 to 65535, or 0 for any free one.

    Raises:
        ConfigError: `text` is none of these.
    """
    port = parse_int_human(text)
    if port != 0 and not 1024 <= port <= 65535:
        raise ConfigError(f"got {port}; need 1024 to 65535, or 0 for any free port")
    return port


def start_server(config: ServeConfig) -> int | None:
    """Serve until told to stop; return the exit code. Tests put a fake here."""
    from tiercel.api.http.server import serve
    from tiercel.api.http.settings import ServerSettings

    level = env.read(env.LOG) or "info"
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(asctime)s %(name)s: %(message)s")
    settings = ServerSettings(
        served_names=config.served_names,
        host=config.host,
        port=config.port,
        api_keys=config.api_keys,
        is_insecure=config.is_insecure,
        has_page=config.has_page,
        has_open_metrics=config.has_open_metrics,
        shutdown_s=config.shutdown_s,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        otlp_traces_endpoint=config.otlp_traces_endpoint,
        stats_interval_s=config.stats_interval_s,
        has_docs=config.has_docs,
        has_tokenizer_info=config.has_tokenizer_info,
        n_stored_max=config.n_stored_max,
    )
    return serve(settings, lambda: build_facade(config))


def build_facade(config: ServeConfig) -> "EngineFacade":
    """Build and start the engine, and say what fits in it."""
    from tiercel.api.http.facade import EngineFacade
    from tiercel.boot import build_engine

    options = engine_options(model=config.model, **config.engine_options)
    engine = build_engine(options, on_plan=lambda plan: print(plan.capacity.describe(), file=sys.stderr, flush=True))
    plan = engine.plan
    return EngineFacade(
        client=engine.client,
        tokenizer=engine.tokenizer,
        fingerprint=plan.identity[:8],
        generation_defaults=plan.checkpoint.generation_config,
        cache_facts={"cache_dtype": plan.kv_dtype, "enable_prefix_caching": str(plan.options.enable_prefix_caching)},
        close=engine.close,
    )
