"""`tiercel run-batch`: a file of requests to a file of answers, by an engine of this process. Checks its flags, opens
the files before a model is loaded, and leaves either a whole output or none under its name.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tiercel.base.config import engine_options
from tiercel.base.errors import ConfigError
from tiercel.cli.options import ENGINE_OPTIONS, SOURCE_OPTIONS, add_engine_options, add_options, given_options
from tiercel.cli.parsing import CommandParser, checked
from tiercel.cli.run import add_model_source, find_model, for_tokenizer
from tiercel.cli.run_request import RunRequest
from tiercel.cli.serve import ServeRequest, build_facade

if TYPE_CHECKING:
    from tiercel.api.http.batch import BatchCounts
    from tiercel.api.http.facade import EngineFacade
    from tiercel.base.options import Option

_NO_SERVER = "nothing is listened on here; leave it out"


def configure(parser: CommandParser) -> None:
    """Give `parser` what `run-batch` takes."""
    parser.usage = "tiercel run-batch -i IN.jsonl -o OUT.jsonl [--model MODEL] [flags]"
    parser.epilog = (
        'A line of the input: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}. '
        "The exit code is 0 when every line was answered, 1 when some were refused or failed: their answers say why."
    )
    parser.removed |= {
        "host": _NO_SERVER,
        "port": _NO_SERVER,
        "url": _NO_SERVER,
        "enable-metrics": _NO_SERVER,
        "output-tmp-dir": "answers are written beside the output; leave it out",
    }
    parser.add_argument(
        "-i", "--input-file", type=checked(_local), required=True, metavar="FILE", help="requests, one a line"
    )
    parser.add_argument(
        "-o", "--output-file", type=checked(_local), required=True, metavar="FILE", help="where the answers go"
    )
    parser.add_argument("--model", metavar="MODEL", help="a folder, .gguf file, catalogue name or org/name")
    add_options(parser, _batch_rows())
    add_model_source(parser)
    add_engine_options(parser)


def execute(args: Any) -> int:
    """Answer the file; 1 if a line was not answered with 200."""
    from dataclasses import replace

    from tiercel.api.http.settings import ServerSettings

    options, source = given_options(args, ENGINE_OPTIONS), given_options(args, SOURCE_OPTIONS)
    engine_options(**options)
    given = {"served_names": ("model",), **given_options(args, _batch_rows())}
    settings = ServerSettings(**given, has_docs=False, has_page=False)
    partial = args.output_file.with_name(args.output_file.name + ".partial")
    with args.input_file.open("rb") as requests, partial.open("wb") as answers:
        found = find_model(RunRequest(args.model, None), offline=args.offline, **source)
        if not hasattr(args, "served_model_name"):
            settings = replace(settings, served_names=(found.display_name,))
        config = ServeRequest(str(found.path), settings, options | for_tokenizer(source))
        try:
            counts = _answer(config, requests, answers)
        except BaseException:
            answers.flush()
            if answers.tell():
                print(f"tiercel run-batch: the answers so far are in {partial}", file=sys.stderr)
            raise
        answers.flush()
        os.fsync(answers.fileno())
    partial.replace(args.output_file)
    failed = f", {counts.n_failed} of them refused or failed" if counts.n_failed else ""
    print(f"tiercel run-batch: {counts.n_lines} lines{failed}; the answers are in {args.output_file}", file=sys.stderr)
    return 1 if counts.n_failed else 0


def _local(text: str) -> Path:
    if "://" in text:
        raise ConfigError(f"got {text[:200]!r}; need a file of this machine: fetch it first, or send it afterwards")
    path = Path(text)
    if path.is_dir():
        raise ConfigError(f"got {text[:200]!r}, a folder; need a file")
    return path


def _batch_rows() -> "tuple[Option, ...]":
    """Give the server's rows that mean something for a file."""
    from tiercel.api.http.settings import server_rows

    is_ours = ("served_names",)
    return tuple(row for row in server_rows() if row.group in ("chat", "limits") or row.name in is_ours)


def _answer(config: ServeRequest, requests: BinaryIO, answers: BinaryIO) -> "BatchCounts":
    from tqdm import tqdm

    n_lines = sum(1 for line in requests if line.strip())
    requests.seek(0)
    engine = build_facade(config)
    try:
        with tqdm(total=n_lines, unit="line", file=sys.stderr, disable=None) as bar:
            return asyncio.run(_run(engine, config.settings, requests, answers, bar))
    finally:
        engine.close()


async def _run(engine: "EngineFacade", settings: Any, requests: BinaryIO, answers: BinaryIO, bar: Any) -> "BatchCounts":
    from tiercel.api.http.app import make_app
    from tiercel.api.http.batch import answer_batch, read_lines

    app = make_app(engine, settings)
    try:
        return await answer_batch(
            app,
            read_lines(requests, settings.body_bytes_max),
            answers.write,
            # Twice what is computed together: the next ones are read, rendered and queued meanwhile.
            n_at_once=2 * engine.client.core.config.max_num_seqs,
            on_answer=bar.update,
        )
    finally:
        app.service.close()
