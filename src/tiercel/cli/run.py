"""`tiercel run`: answer one prompt, or chat, with a model in this process."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tiercel.base.config import engine_options
from tiercel.base.errors import ConfigError, ModelNotFound, RequestError
from tiercel.cli.answer import TextEngine, show_answer, show_stats
from tiercel.cli.options import (
    ENGINE_OPTIONS,
    SAMPLING_OPTIONS,
    SOURCE_OPTIONS,
    add_engine_options,
    add_options,
    given_options,
)
from tiercel.cli.parsing import CommandParser
from tiercel.cli.progress import FetchProgress
from tiercel.cli.run_request import RunRequest, read_request
from tiercel.hub.resolve import ResolvedModel, resolve

# An answer ends where the model ends it, not after vLLM's 16 tokens. At temperature 1, the smallest models wander.
_DEFAULTS: Mapping[str, Any] = {"max_tokens": None, "temperature": 0.7, "top_p": 0.95}

_BLAS = "OPENBLAS_NUM_THREADS"

# The seed of `run` is the answer's, and it has one request at a time.
_SERVER_ONLY = frozenset(
    {
        *("seed", "skip_tokenizer_init", "max_logprobs", "max_waiting", "scheduling_policy"),
        *("stream_interval", "structured_outputs_config", "reasoning_config"),
    }
)
_ENGINE_OPTIONS = tuple(option for option in ENGINE_OPTIONS if option.name not in _SERVER_ONLY)


def configure(parser: CommandParser) -> None:
    """Give `parser` what `run` takes."""
    parser.usage = "tiercel run [MODEL] [PROMPT] [-m MODEL] [flags]"
    parser.epilog = (
        "One word is a model if it names one (a path that exists, a catalogue name, or org/name), else a prompt for "
        "the default model. Text piped in is the prompt; with a prompt written too, it follows that after an empty "
        "line. Without a prompt, on a terminal: a chat, in which /help says more. Answers are sampled at temperature "
        "0.7, top_p 0.95, unless the flags say otherwise. The exit code is 130 after Ctrl-C."
    )
    parser.add_argument("words", nargs="*", metavar="MODEL PROMPT", help="a model, a prompt, or both")
    parser.add_argument("-m", "--model", metavar="MODEL", help="the model, whatever the words are")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without a chat template")
    parser.add_argument("--stats", action="store_true", help="say on standard error how long it took")
    add_model_source(parser)
    add_options(parser, SAMPLING_OPTIONS)
    add_engine_options(parser, _ENGINE_OPTIONS)


def execute(args: Any) -> int:
    """Answer or chat; return the exit code."""
    request = read_request(args.words, args.model, sys.stdin, sys.stderr)
    settings = {**_DEFAULTS, **given_options(args, SAMPLING_OPTIONS)}
    if args.raw and args.system is not None:
        raise ConfigError("run: got --system with --raw; a text that is continued as it stands has no place for one")
    # Wrong values are told before anything is fetched or loaded.
    make_params(settings)
    options = given_options(args, _ENGINE_OPTIONS)
    engine_options(**options)
    source = given_options(args, SOURCE_OPTIONS)
    found = find_model(request, offline=args.offline, **source)
    engine = open_engine(str(found.path), options | for_tokenizer(source))
    try:
        if args.system is not None and not engine.has_chat_template:
            raise ConfigError(f"run: got --system, but {found.display_name} has no chat template; put it in the prompt")
        if request.prompt is None:
            _chat(engine, settings, args)
            return 0
        params = make_params(settings)
        if args.raw or not engine.has_chat_template:
            stream = engine.stream(request.prompt, params)
        else:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            stream = engine.stream_chat([*system, {"role": "user", "content": request.prompt}], params)
        _make_writable()
        answer = show_answer(stream, sys.stdout)
        if args.stats:
            show_stats(engine, answer, sys.stderr)
        return 130 if answer.is_stopped else 0
    finally:
        engine.close()


def add_model_source(parser: CommandParser) -> None:
    """Give `parser` the flags that say where a model may come from."""
    add_options(parser, SOURCE_OPTIONS)
    source = parser.group("source")
    source.add_argument("--offline", action="store_true", help="fetch nothing; use what is on this machine")


def for_tokenizer(source: Mapping[str, Any]) -> dict[str, Any]:
    """Give what of `source` counts for a tokenizer from elsewhere too; a revision is the model's alone."""
    return {name: value for name, value in source.items() if name != "revision"}


def find_model(request: RunRequest, *, offline: bool, **source: Any) -> ResolvedModel:
    """Bring the requested model here, showing progress; `source` are the values of `SOURCE_OPTIONS`.

    Raises:
        ModelNotFound: there is none; if its name stood where a prompt may, the message says how to send it as one.
    """
    try:
        with FetchProgress(request.model or "the default model") as progress:
            return resolve(request.model, offline=offline, progress=progress, **source)
    except ModelNotFound as error:
        if not request.is_guess:
            raise
        raise ModelNotFound(
            f"{error}; if {request.model!r} is a prompt: tiercel run -m MODEL {request.model!r}"
        ) from None


def open_engine(model: str, options: Mapping[str, Any]) -> TextEngine:
    """Load `model` into an engine of its own. Tests put a fake here."""
    from tiercel.llm.llm import LLM

    with _one_blas_thread():
        engine: TextEngine = LLM(model, **options)
    return engine


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Have numpy, if it is imported now, start no threads for products of matrices: nothing here multiplies any, and
    they would spin for 60 ms on the processors that pack the weights.
    """
    if _BLAS in os.environ or "numpy" in sys.modules:
        yield
        return
    os.environ[_BLAS] = "1"
    try:
        yield
    finally:
        del os.environ[_BLAS]


def make_params(settings: Mapping[str, Any]) -> Any:
    """Build sampling parameters.

    Raises:
        ConfigError: a value is out of its range.
    """
    from tiercel.protocol.params import SamplingParams

    try:
        return SamplingParams(**settings)
    except RequestError as error:
        raise ConfigError(str(error)) from None


def _chat(engine: TextEngine, settings: Mapping[str, Any], args: Any) -> None:
    # Importing it gives `input` a line that can be edited and earlier lines to go back to.
    try:
        import readline  # noqa: F401
    except ImportError:
        print("tiercel: this Python has no readline: lines cannot be edited", file=sys.stderr)
    from tiercel.cli.chat import Chat

    _make_writable()
    Chat(engine, settings, make_params, system=args.system, is_raw=args.raw, has_stats=args.stats).run()


def _make_writable() -> None:
    """Let standard output take any text: what its encoding lacks is written as `?` and does not end the answer."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
