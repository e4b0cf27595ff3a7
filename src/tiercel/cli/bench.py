"""`tiercel bench`: measures this engine, beside peers that take turns with it. A family of commands, with a table of
its own; each parses its flags here (`serve` and `compare` in `bench_serve`) and is done in `tiercel.bench`.

Exit codes beside the usual ones: 1 also when a target of a `gate` case is not reached, or a peer was asked for and
could not take part.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercel.base.config import engine_options
from tiercel.base.errors import ConfigError
from tiercel.base.options import parse_float
from tiercel.base.units import parse_int_human
from tiercel.cli import bench_serve
from tiercel.cli.options import ENGINE_OPTIONS, add_engine_options, given_options
from tiercel.cli.parsing import CommandParser, checked

if TYPE_CHECKING:
    import argparse

_OPTIONS = tuple(option for option in ENGINE_OPTIONS if option.name not in ("seed", "skip_tokenizer_init"))


@dataclass(frozen=True, slots=True)
class _Command:
    does: str
    configure: Callable[[CommandParser], None]
    execute: Callable[[Any, str], int]


def main(words: Sequence[str]) -> int:
    """Run the bench command that `words` write and return the exit code."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] not in COMMANDS:
        raise ConfigError(
            f"bench: got {words[0]!r}; need one of {', '.join(COMMANDS)}; `tiercel bench --help` says more"
        )
    from tiercel.bench import machine

    command = COMMANDS[words[0]]
    parser = CommandParser(f"tiercel bench {words[0]}", command.does)
    command.configure(parser)
    return command.execute(parser.parse(words[1:]), machine.command(["bench", *words]))


def _help() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: tiercel bench COMMAND [...]",
            "",
            "Measure this engine, and peers that take turns with it.",
            "",
            *(f"  {name:<{width}}  {command.does}" for name, command in COMMANDS.items()),
            "",
            "`tiercel bench COMMAND --help` says what each takes. Results are rows of JSON, with all that made them.",
        ]
    )


def _add_field(parser: CommandParser, *, n_rounds: int, n_warmups: int) -> None:
    """Give `parser` the flags that say who takes part and how often."""
    parser.set_defaults(num_iters_default=n_rounds, num_iters_warmup_default=n_warmups)
    parser.add_argument("-m", "--model", metavar="MODEL", help="a folder, .gguf file, catalogue name or org/name")
    _add_numbers(
        parser,
        (
            ("num-iters", f"rounds that count (default: {n_rounds})"),
            ("num-iters-warmup", f"rounds before that, which do not count (default: {n_warmups})"),
            (
                "agree-tokens",
                "first greedy tokens a peer must share with ours, of all check texts but one (default: 4)",
            ),
            ("seed", "of the random prompts (default: 0)"),
        ),
    )
    peers = parser.add_argument_group("peers")
    peers.add_argument(
        "--peer",
        action="append",
        default=[],
        type=checked(_read_peer),
        metavar="NAME=PYTHON",
        help="let an engine in another virtual environment take turns; PYTHON is its interpreter; repeatable",
    )
    peers.add_argument(
        "--peer-model",
        action="append",
        default=[],
        type=checked(_read_peer),
        metavar="NAME=PATH",
        help="what a peer loads, if it is not our model's file; repeatable",
    )
    peers.add_argument(
        "--peers-dir", type=Path, metavar="DIR", help="where the peers' scripts are (default: the checkout's)"
    )
    peers.add_argument(
        "--peer-timeout",
        type=checked(parse_float),
        default=600.0,
        metavar="S",
        help="seconds for one answer (default: 600)",
    )
    add_results(parser)
    add_engine_options(parser, _OPTIONS)


def add_results(parser: CommandParser) -> None:
    """Give `parser` the flags that say what is measured by name, and where the row goes."""
    rows = parser.add_argument_group("results")
    rows.add_argument("--case", metavar="NAME", help="a case of benchmarks/cases, or a .toml file; flags win over it")
    rows.add_argument("--output", type=Path, metavar="FILE", help="add the row to this .jsonl file")
    rows.add_argument("--json", action="store_true", help="write the row to standard output as JSON")


def _add_numbers(parser: "CommandParser | argparse._ArgumentGroup", flags: Sequence[tuple[str, str]]) -> None:
    import argparse

    for flag, does in flags:
        parser.add_argument(
            f"--{flag}", type=checked(parse_int_human), metavar="N", default=argparse.SUPPRESS, help=does
        )


def _read_peer(text: str) -> tuple[str, Path]:
    from tiercel.bench.peers import read_peer

    return read_peer(text)


def _case(args: Any, bench: str) -> Any:
    from tiercel.bench import machine
    from tiercel.bench.cases import Case, find_case, load_case

    if args.case is None:
        return Case("unnamed", bench)
    return load_case(find_case(args.case, machine.checkout()), bench)


def _told(case: Any, command: str) -> Any:
    from tiercel.bench.offline import Told

    return Told(case=case.name, bench=case.bench, kind=case.kind, reach=case.reach, command=command)


def _field(args: Any, work: dict[str, Any]) -> Any:
    """Make the value that says who takes part; what it uses is taken out of `work`, the case's share."""
    from tiercel.bench import machine
    from tiercel.bench.offline import Field

    options = {option.name: work.pop(option.name) for option in _OPTIONS if option.name in work} | given_options(
        args, _OPTIONS
    )
    engine_options(**options)
    folder = args.peers_dir
    if folder is None and args.peer:
        checkout = machine.checkout()
        folder = None if checkout is None else checkout / "benchmarks/peers"
    numbers = {
        name: getattr(args, name, work.pop(name, default))
        for name, default in (
            ("num_iters", args.num_iters_default),
            ("num_iters_warmup", args.num_iters_warmup_default),
            ("agree_tokens", 4),
            ("seed", 0),
        )
    }
    model = work.pop("model", None)
    return Field(
        model=args.model or model,
        options=options,
        n_warmups=numbers["num_iters_warmup"],
        n_rounds=numbers["num_iters"],
        n_agree_tokens=numbers["agree_tokens"],
        seed=numbers["seed"],
        peers=dict(args.peer),
        peer_models=dict(args.peer_model),
        peers_folder=folder,
        deadline_s=args.peer_timeout,
    )


def _work(kind: Any, args: Any, case_name: str, work: dict[str, Any]) -> Any:
    """Make the value that says what is done, from flags, then the case, then its defaults."""
    from dataclasses import fields

    known = [one.name for one in fields(kind)]
    for name in work:
        if name not in known:
            raise ConfigError(
                f"case {case_name}: work: got {name!r}; known are {', '.join(known)}, and the engine's options"
            )
    return kind(**work | {name: getattr(args, name) for name in known if hasattr(args, name)})


def _finish(args: Any, row: Any, *, is_told: bool = True) -> int:
    """Write the row where it is wanted, and, if `is_told`, say what it holds."""
    from tiercel.bench import rows, table

    told = row.as_dict() if args.output is None else rows.append(args.output, row)
    if args.json:
        import json

        json.dump(told, sys.stdout, indent=2)
        print()
    elif is_told:
        print(table.describe(told))
    is_missed = row.kind == "gate" and not all(target["is_reached"] for target in row.reach)
    return 1 if row.skipped or is_missed else 0


def _configure_latency(parser: CommandParser) -> None:
    _add_numbers(
        parser,
        (
            ("input-len", "tokens of each prompt (default: 32)"),
            ("output-len", "tokens of each answer (default: 128)"),
            ("batch-size", "requests at once (default: 8)"),
        ),
    )
    _add_step_overhead(parser)
    _add_speculative(parser)
    _add_field(parser, n_rounds=30, n_warmups=10)


def _execute_latency(args: Any, command: str) -> int:
    from tiercel.bench import latency

    case = _case(args, "latency")
    share = dict(case.work)
    if getattr(args, "compare_speculative", share.get("compare_speculative", False)):
        from tiercel.bench import speculative

        who = _field_alone(args, share, "latency --compare-speculative")
        pair = _work(speculative.SpeculativeWork, args, case.name, share)
        return _finish(args, speculative.bench(who, _told(case, command), pair, on_note=bench_serve.note))
    who = _field(args, share)
    work = _work(latency.LatencyWork, args, case.name, share)
    return _finish(args, latency.bench(who, _told(case, command), work, on_note=bench_serve.note))


def _add_speculative(parser: CommandParser) -> None:
    import argparse

    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--compare-speculative",
        action="store_true",
        default=argparse.SUPPRESS,
        help="let the same engine answer without speculation too, in turns, and say what that brings",
    )
    group.add_argument(
        "--text",
        metavar="KIND",
        default=argparse.SUPPRESS,
        help="with it, what is asked: chat, edit or extract (default: chat)",
    )
    group.add_argument(
        "--questions",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="with it, ask these instead, one a line; none is asked twice",
    )
    group.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        default=argparse.SUPPRESS,
        help="with it, let answers end where the model ends them",
    )
    _add_numbers(
        group,
        (("n-behind", "with it, time the first token of a prompt that comes while so many streams decode"),),
    )


def _add_step_overhead(parser: CommandParser) -> None:
    import argparse

    parser.add_argument(
        "--step-overhead",
        action="store_true",
        default=argparse.SUPPRESS,
        help="time our kernels, and say which part of the whole they are not",
    )


def _configure_throughput(parser: CommandParser) -> None:
    import argparse

    _add_numbers(
        parser,
        (
            ("num-prompts", "requests at once (default: 32)"),
            ("input-len", "tokens of each prompt (default: 128)"),
            ("output-len", "tokens of each answer (default: 128)"),
        ),
    )
    parser.add_argument(
        "--random-range-ratio",
        type=checked(parse_float),
        default=argparse.SUPPRESS,
        metavar="X",
        help="lengths vary by this fraction to both sides (default: 0)",
    )
    parser.add_argument(
        "--against-single",
        action="store_true",
        default=argparse.SUPPRESS,
        help="let one request also run alone in each round, and say how much more all give",
    )
    parser.add_argument(
        "--against-form",
        action="store_true",
        default=argparse.SUPPRESS,
        help="let all also run bound to a JSON schema in each round, and say how many times as long that takes",
    )
    _add_step_overhead(parser)
    _add_field(parser, n_rounds=5, n_warmups=1)


def _execute_throughput(args: Any, command: str) -> int:
    from tiercel.bench import throughput

    case = _case(args, "throughput")
    share = dict(case.work)
    who = _field(args, share)
    work = _work(throughput.ThroughputWork, args, case.name, share)
    return _finish(args, throughput.bench(who, _told(case, command), work, on_note=bench_serve.note))


def _configure_served(parser: CommandParser) -> None:
    _add_numbers(
        parser,
        (
            ("num-prompts", "requests at once (default: 32)"),
            ("input-len", "tokens of each prompt (default: 128)"),
            ("output-len", "tokens of each answer (default: 128)"),
        ),
    )
    _add_field(parser, n_rounds=5, n_warmups=1)


def _execute_served(args: Any, command: str) -> int:
    from tiercel.bench import served

    case = _case(args, "served")
    share = dict(case.work)
    who = _field_alone(args, share, "served")
    work = _work(served.ServedWork, args, case.name, share)
    return _finish(args, served.bench(who, _told(case, command), work, on_note=bench_serve.note))


def _configure_context(parser: CommandParser) -> None:
    _add_numbers(
        parser,
        (
            ("input-len", "tokens of the long prompt (default: 4096)"),
            ("short-len", "tokens of the short prompt (default: 16)"),
            ("output-len", "tokens of each answer (default: 64)"),
        ),
    )
    _add_field(parser, n_rounds=5, n_warmups=1)


def _execute_context(args: Any, command: str) -> int:
    from tiercel.bench import context

    case = _case(args, "context")
    share = dict(case.work)
    who = _field_alone(args, share, "context")
    work = _work(context.ContextWork, args, case.name, share)
    return _finish(args, context.bench(who, _told(case, command), work, on_note=bench_serve.note))


def _field_alone(args: Any, work: dict[str, Any], bench: str) -> Any:
    """As `_field`, for what compares ours with ours."""
    who = _field(args, work)
    if who.peers:
        raise ConfigError(f"bench {bench}: got --peer; it compares ours with ours; leave it out")
    return who


def _configure_startup(parser: CommandParser) -> None:
    _add_field(parser, n_rounds=7, n_warmups=1)


def _execute_startup(args: Any, command: str) -> int:
    from tiercel.bench import startup

    case = _case(args, "startup")
    share = dict(case.work)
    who = _field(args, share)
    if share:
        raise ConfigError(f"case {case.name}: work: got {next(iter(share))!r}; a start has only the engine's options")
    return _finish(args, startup.bench(who, _told(case, command), on_note=bench_serve.note))


def _configure_ops(parser: CommandParser) -> None:
    parser.add_argument("-m", "--model", metavar="MODEL", help="a folder, .gguf file, catalogue name or org/name")
    _add_numbers(
        parser,
        (
            ("n-tokens", "tokens of the step (default: 1)"),
            ("n-sequences", "sequences they belong to (default: 1)"),
            ("context", "tokens before them in each sequence (default: 128)"),
            ("num-iters", "steps that count (default: 100)"),
            ("num-iters-warmup", "steps before that, which do not count (default: 10)"),
        ),
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a roofline picture, as SVG")
    add_results(parser)
    add_engine_options(parser, _OPTIONS)


def _execute_ops(args: Any, command: str) -> int:
    from tiercel.bench import ops, plot

    case = _case(args, "ops")
    share = dict(case.work)
    options = {option.name: share.pop(option.name) for option in _OPTIONS if option.name in share}
    options |= given_options(args, _OPTIONS)
    engine_options(**options)
    model = share.pop("model", None)
    model = args.model or model
    work = _work(ops.OpsWork, args, case.name, share)
    row, result = ops.bench(model, options, _told(case, command), work, on_note=bench_serve.note)
    if args.plot is not None:
        plot.write(args.plot, plot.roofline(result))
    if not args.json:
        print(result.table())
    return _finish(args, row, is_told=args.json)


def _configure_table(parser: CommandParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="files of rows")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table into this document, between its marks")


def _execute_table(args: Any, command: str) -> int:
    from tiercel.bench import rows, table

    made = table.markdown(row for path in args.files for row in rows.read(path))
    if args.into is None:
        print(made, end="")
        return 0
    try:
        args.into.write_text(table.put_into(args.into.read_text(encoding="utf-8"), made), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"bench table: into: {args.into.name}: {error.strerror}") from None
    return 0


COMMANDS: Mapping[str, _Command] = {
    "latency": _Command(
        "how long a group of requests takes, with nothing else running", _configure_latency, _execute_latency
    ),
    "throughput": _Command(
        "how fast many requests are done that come at once", _configure_throughput, _execute_throughput
    ),
    "context": _Command("what a long context costs, against what it must", _configure_context, _execute_context),
    "served": _Command("what is left of the offline rate over HTTP", _configure_served, _execute_served),
    "startup": _Command("how soon a new process answers, and its peak memory", _configure_startup, _execute_startup),
    "ops": _Command("each op's time, cost and fraction of the machine's limit", _configure_ops, _execute_ops),
    "serve": _Command(
        "load on a server, and what its clients felt", bench_serve.configure_serve, bench_serve.execute_serve
    ),
    "compare": _Command(
        "a canary's verdict between two results of serve", bench_serve.configure_compare, bench_serve.execute_compare
    ),
    "table": _Command("write the newest row of each case as a Markdown table", _configure_table, _execute_table),
}
