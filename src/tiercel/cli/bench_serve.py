"""`tiercel bench serve` and `compare`: load on a server, and the verdict between two such runs. Part of `cli.bench`."""

import sys
from pathlib import Path
from typing import Any

from tiercel.base.options import parse_float
from tiercel.base.units import parse_int_human
from tiercel.cli.parsing import CommandParser, checked

_KEY_VARIABLES = ("TIERCEL_API_KEY", "OPENAI_API_KEY")


def note(text: str) -> None:
    """Tell how far a benchmark is."""
    print(f"tiercel bench: {text}", file=sys.stderr, flush=True)


def configure_serve(parser: CommandParser) -> None:
    """Give `parser` what `bench serve` takes."""
    parser.epilog = f"A key for the server may come from {' or '.join(_KEY_VARIABLES)}."
    add = parser.add_argument
    add(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: http://127.0.0.1:8000)"
    )
    add("--backend", default="openai", help="openai (completions, the default) or openai-chat")
    add("--endpoint", metavar="PATH", help="the route, if it is not the backend's")
    add("-m", "--model", metavar="NAME", help="the model's name there (default: the first it lists)")
    add("--dataset-name", default="random", help="random (the default), prefix_repetition or custom")
    add("--dataset-path", type=Path, metavar="FILE", help='for custom: lines of {"prompt": ..., "output_len": ...}')
    for flag, default, does in (
        ("num-prompts", 100, "requests in all (default: 100)"),
        ("random-input-len", 128, "words of each prompt, about a token each (default: 128)"),
        ("random-output-len", 128, "tokens of each answer (default: 128)"),
        ("random-prefix-len", 0, "words that prompts share, before their own (default: 0)"),
        ("num-prefixes", 10, "for prefix_repetition: different shared beginnings (default: 10)"),
        ("max-concurrency", None, "the most requests open at once (default: no bound)"),
        ("seed", 0, "of prompts and times (default: 0)"),
        ("num-warmups", 0, "requests before those that count (default: 0)"),
    ):
        add(f"--{flag}", type=checked(parse_int_human), default=default, metavar="N", help=does)
    for flag, real, does in (
        ("random-range-ratio", 0.0, "lengths vary by this fraction to both sides (default: 0)"),
        ("burstiness", 1.0, "1: Poisson arrivals; less: in bursts; more: even (default: 1)"),
        ("temperature", 0.0, "0 is greedy, which `compare` needs (default: 0)"),
        ("timeout", 60.0, "seconds without anything from the server until a request is stalled (default: 60)"),
    ):
        add(f"--{flag}", type=checked(parse_float), default=real, metavar="X", help=does)
    add("--request-rate", type=checked(_read_rate), metavar="X", help="requests a second (default: inf, all at once)")
    add("--no-ignore-eos", action="store_true", help="let answers end where the model ends them")
    add("--goodput", nargs="+", default=[], type=checked(_read_bound), metavar="NAME:MS", help="as in ttft:500 tpot:50")
    add("--metric-percentiles", default="99", metavar="P,P", help="percentiles to tell (default: 99)")
    add("--save-result", type=Path, metavar="FILE", help="write the result as JSON, with each request's numbers")
    add("--report", type=Path, metavar="FILE", help="write the result as a page of HTML with pictures")
    add("--json", action="store_true", help="write the result to standard output as JSON")


def execute_serve(args: Any, command: str) -> int:
    """Load the server; 1 if a request failed."""
    import json
    import os
    from dataclasses import fields

    from tiercel.bench import machine, plot, report, serve
    from tiercel.bench.http_client import read_url
    from tiercel.bench.traffic import Traffic

    key = next((os.environ[name] for name in _KEY_VARIABLES if os.environ.get(name)), None)
    server = read_url(args.base_url, () if key is None else (("authorization", f"Bearer {key}"),))
    traffic = Traffic(**{one.name: getattr(args, one.name) for one in fields(Traffic)})
    load = serve.Load(
        backend=args.backend,
        endpoint=args.endpoint,
        model=args.model,
        temperature=args.temperature,
        ignore_eos=not args.no_ignore_eos,
        timeout_s=args.timeout,
        n_warmups=args.num_warmups,
        goodput=dict(args.goodput),
        percentiles=[parse_float(part) for part in args.metric_percentiles.split(",")],
    )
    told = serve.bench(server, load, traffic, on_note=note)
    commit, is_dirty = machine.commit(machine.checkout())
    told |= {"command": command, "commit": commit, "is_dirty": is_dirty}
    told |= {"machine": machine.describe(), "versions": machine.versions()}
    whole = json.dumps(told, indent=2)
    if args.save_result is not None:
        plot.write(args.save_result, whole + "\n")
    if args.report is not None:
        plot.write(args.report, report.page(told))
    print(whole if args.json else serve.describe(told))
    return 1 if told["failed"] else 0


def _read_rate(text: str) -> float | None:
    return None if text.lower() in ("inf", "infinity") else parse_float(text)


def _read_bound(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    return name, parse_float(value)


def configure_compare(parser: CommandParser) -> None:
    """Give `parser` what `bench compare` takes."""
    parser.epilog = "The exit code is 0 if the verdict is pass, else 1."
    parser.add_argument("before", type=Path, metavar="A.json", help="a result of `bench serve`")
    parser.add_argument("after", type=Path, metavar="B.json", help="another, after the change")
    parser.add_argument(
        "--tolerance",
        type=checked(parse_float),
        default=0.05,
        metavar="X",
        help="a change of this fraction is none (default: 0.05)",
    )


def execute_compare(args: Any, command: str) -> int:
    """Compare two results; 1 unless the verdict is pass."""
    from tiercel.bench import compare

    found = compare.compare(compare.load(args.before), compare.load(args.after), tolerance_frac=args.tolerance)
    print(found.text())
    return 0 if found.verdict == "pass" else 1
