"""`tiercel train-drafter`: make a draft model for a target. Checks its flags, and hands over to `tiercel.train`.

Exit codes beside the usual ones: 130 also when it was stopped by Ctrl-C; the same command then goes on.
"""

import shlex
import sys
from pathlib import Path
from typing import Any

from tiercel.cli.options import add_options, given_options
from tiercel.cli.parsing import CommandParser
from tiercel.train.options import TrainOptions, train_rows
from tiercel.train.shape import KINDS


def configure(parser: CommandParser) -> None:
    """Give `parser` what `train-drafter` takes."""
    parser.usage = "tiercel train-drafter TARGET --kind KIND --out DIR [flags]"
    parser.epilog = (
        "The target writes texts, and a small network learns to foretell them. Whatever stops it, the same command "
        "goes on where it was. Needs torch: pip install 'tiercel[train]'."
    )
    parser.add_argument("target", metavar="TARGET", help="a folder, .gguf file, catalogue name or org/name")
    parser.add_argument("--kind", required=True, choices=KINDS, help=f"what to make: {', '.join(KINDS)}")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the drafter's folder; new, or begun")
    add_options(parser, train_rows())


def execute(args: Any) -> int:
    """Train, and say what it is worth."""
    from tiercel.train.run import train_drafter

    options = TrainOptions(**given_options(args, train_rows()))
    out = args.out.expanduser()
    try:
        found = train_drafter(args.target, args.kind, out, options, _command(args))
    except KeyboardInterrupt:
        print(f"\ntiercel train-drafter: what is done so far is in {out}; the same command goes on", file=sys.stderr)
        raise
    best = max(found["tokens_a_step"].values())
    print(f"{best:.2f} tokens a step on {found['n_texts']} texts that were not learned from")
    print(f"the drafter is in {out}, the report in {out / 'report' / 'report.md'}")
    return 0


def _command(args: Any) -> str:
    words = ["tiercel", "train-drafter", args.target, "--kind", args.kind, "--out", args.out.name]
    for row in train_rows():
        value = getattr(args, row.dest, None)
        # Where things were on this machine makes no drafter: a name is enough.
        if row.name == "data" or value is None:
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [row.flag, Path(text).name if row.name == "prompts" else text]
    return shlex.join(words)
