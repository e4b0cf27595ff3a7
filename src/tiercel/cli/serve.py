"""`tiercel serve`: a model behind OpenAI's HTTP routes. Reads its flags, finds the model, hands over to the server."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tiercel.api.http.settings import ServerSettings, server_rows
from tiercel.base.config import engine_options
from tiercel.base.errors import ConfigError
from tiercel.base.options import from_environment
from tiercel.cli.options import ENGINE_OPTIONS, SOURCE_OPTIONS, add_engine_options, add_options, given_options
from tiercel.cli.parsing import CommandParser
from tiercel.cli.run import add_model_source, find_model, for_tokenizer
from tiercel.cli.run_request import RunRequest

if TYPE_CHECKING:
    from tiercel.api.http.facade import EngineFacade


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """What is to be served: a model's files, the server's settings, and the engine's options by keyword."""

    model: str
    settings: ServerSettings
    engine_options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """What the flags say, checked; nothing is looked for yet. `is_named`: they say what the model is called."""

    model: str | None
    settings: ServerSettings
    engine_options: Mapping[str, Any]
    source: Mapping[str, Any]
    is_offline: bool
    is_named: bool

    def find(self) -> ServeRequest:
        """Bring the model here.

        Raises: ModelNotFound
        """
        found = find_model(RunRequest(self.model, None), offline=self.is_offline, **self.source)
        named = self.settings if self.is_named else replace(self.settings, served_names=(found.display_name,))
        return ServeRequest(str(found.path), named, {**self.engine_options, **for_tokenizer(self.source)})


def configure(parser: CommandParser) -> None:
    """Give `parser` what `serve` takes."""
    parser.usage = "tiercel serve [MODEL] [--host HOST] [--port PORT] [flags]"
    parser.epilog = "An API key may also come from TIERCEL_API_KEY or VLLM_API_KEY, where other users cannot see it."
    parser.removed |= {"model": "removed for serve: write the model without a flag: tiercel serve MODEL"}
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, .gguf file, catalogue name or org/name")
    add_options(parser, server_rows())
    add_model_source(parser)
    add_engine_options(parser)


def execute(args: Any) -> int:
    """Serve until told to stop."""
    return start_server(read_flags(args, os.environ)) or 0


def read_flags(args: Any, environ: Mapping[str, str]) -> ServeFlags:
    """Check the flags, all of them: wrong values are told before an address is taken or anything fetched.

    Raises:
        ConfigError: names without a model, an address others can reach without a key, or a value out of its range.
    """
    given = given_options(args, server_rows())
    if "served_names" in given and args.model is None:
        raise ConfigError(
            "serve: got --served-model-name without a model; need to know what has that name: serve MODEL"
        )
    if "api_keys" in given and "api_key" not in args.of_file:
        print("tiercel serve: other users can see --api-key; TIERCEL_API_KEY is not seen", file=sys.stderr)
    settings = read_settings(args, environ)
    options, source = given_options(args, ENGINE_OPTIONS), given_options(args, SOURCE_OPTIONS)
    engine_options(environ=environ, **options)
    return ServeFlags(args.model, settings, options, source, args.offline, "served_names" in given)


def read_settings(args: Any, environ: Mapping[str, str]) -> ServerSettings:
    """Build the settings from flags, a file and the environment.

    Raises: ConfigError: as `ServerSettings`.
    """
    return server_settings(given_options(args, server_rows()), environ)


def server_settings(given: Mapping[str, Any], environ: Mapping[str, str]) -> ServerSettings:
    """Build the settings from what is given, then the environment, then defaults; all keys count, wherever they are
    from. The name is a placeholder where none is given.

    Raises: ConfigError: as `ServerSettings`.
    """
    rows = server_rows()
    values = {"served_names": ("model",), **from_environment(rows, environ), **given}
    (keys,) = (row for row in rows if row.name == "api_keys")
    found = (environ[name] for name, _ in keys.env if environ.get(name))
    values["api_keys"] = (*given.get("api_keys", ()), *found)
    return ServerSettings(**values)


def start_server(flags: ServeFlags) -> int | None:
    """Take the address, find the model, serve until told to stop; return the exit code. Tests put a fake here."""
    from tiercel.api.http.logs import set_up_logging
    from tiercel.api.http.server import serve

    def build() -> "tuple[EngineFacade, ServerSettings]":
        request = flags.find()
        return build_facade(request), request.settings

    set_up_logging(flags.settings)
    return serve(flags.settings, build)


def build_facade(request: ServeRequest) -> "EngineFacade":
    """Build and start the engine, and say what fits in it."""
    from tiercel.api.http.facade import EngineFacade
    from tiercel.boot.engine import build_engine

    options = engine_options(model=request.model, **request.engine_options)
    engine = build_engine(options, on_plan=lambda plan: print(plan.capacity.describe(), file=sys.stderr, flush=True))
    plan = engine.plan
    return EngineFacade(
        client=engine.client,
        tokenizer=engine.tokenizer,
        fingerprint=plan.identity[:8],
        generation_defaults=plan.generation_defaults,
        cache_facts={"cache_dtype": plan.kv_dtype, "enable_prefix_caching": str(plan.is_prefix_caching)},
        close=engine.close,
    )
