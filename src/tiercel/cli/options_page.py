"""The page `docs/options.md`, written from the table of options. `python -m tiercel.cli.options_page > docs/options.md`
writes it anew; a test compares.
"""

from tiercel.api.http.settings import server_rows
from tiercel.base.absent import ABSENT, REMOVED, REMOVED_VARIABLES, described
from tiercel.base.config import engine_rows
from tiercel.base.env import HONOURED
from tiercel.base.options import Option
from tiercel.cli.help import default_text
from tiercel.spec.settings import KEYS
from tiercel.train.options import train_rows

_HEAD = """# Options

Written by `python -m tiercel.cli.options_page` from the table of options; do not edit it.

Each option is a flag (with `-` or `_`), a key of a `--config FILE.yaml` (flat, or under its group's title; a list where
a flag takes several; a mapping for JSON; `false` switches off), and, if it is the engine's, a keyword of `LLM` and
`AsyncLLM`. The command line wins over the file, the file over the environment, the environment over the default.
Numbers may be written `25.6k` (thousands) or `4K` (1024s), sizes `2GiB`. A flag of a JSON object also takes its parts:
`--flag.key value`.
"""


def page() -> str:
    """Write the page."""
    lines = [_HEAD]
    engine = (*engine_rows(), *engine_rows("source"))
    lines += _tables("The engine", "of run, serve, run-batch and bench, and of Python", engine)
    lines += [
        "### speculative_config",
        "",
        "What the object of `--speculative-config` may hold.",
        "",
        "| key | | methods |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `{name}` | {_cell(key.does)} | {', '.join(key.methods) or 'all'} |" for name, key in KEYS.items()]
    lines.append("")
    lines += _tables("The server", "of serve; those about chats and limits of run-batch too", server_rows())
    lines += _tables("Training", "of train-drafter; flags only", train_rows())
    lines += [
        "## Environment",
        "",
        "Variables of vLLM's that are read here:",
        "",
        "| variable | stands for |",
        "| --- | --- |",
    ]
    lines += [f"| `{name}` | {does} |" for name, does in HONOURED.items()]
    lines += ["", "Any other that begins with `VLLM_` is named in the log, once a start. Ours: `tiercel env`.", ""]
    lines += [
        "## Gone from vLLM",
        "",
        "Refused, wherever they come from, with this hint:",
        "",
        "| option | |",
        "| --- | --- |",
    ]
    lines += [f"| `{name}` | {_cell(str(row))} |" for name, row in (REMOVED | REMOVED_VARIABLES).items()]
    lines += ["", "## Of vLLM's, and none here", ""]
    lines += ["Taken with values that change nothing, refused with any other:", "", "| option | |", "| --- | --- |"]
    lines += [f"| `{name}` | {_cell(described(name))} |" for name in sorted(ABSENT)]
    return "\n".join(lines) + "\n"


def _tables(title: str, where: str, rows: tuple[Option, ...]) -> list[str]:
    lines = [f"## {title}", "", f"Options {where}.", ""]
    for group in dict.fromkeys(row.group for row in rows):
        lines += [f"### {group}", "", "| option | | default |", "| --- | --- | --- |"]
        lines += [_row(row) for row in rows if row.group == group]
        lines.append("")
    return lines


def _row(row: Option) -> str:
    names = ", ".join(f"`{name}`" for name in (row.short, row.flag) if name)
    words = f" {row.metavar}" if row.metavar else ""
    does = row.help
    if row.choices:
        does += f" ({', '.join(str(one) for one in row.choices if one is not None)})"
    return f"| {names}{_cell(words)} | {_cell(does)} | {_cell(default_text(row))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
