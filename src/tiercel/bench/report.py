"""A result of `bench serve` as one page of HTML with pictures: opens anywhere, loads nothing."""

import html
from collections.abc import Mapping
from typing import Any

from tiercel.bench.plot import steps

_STYLE = (
    "body{font-family:sans-serif;max-width:980px;margin:2em auto;color:#222}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}td:first-child{text-align:left}"
    "svg{max-width:470px}pre{white-space:pre-wrap}"
)


def page(told: Mapping[str, Any]) -> str:
    """Return the page."""
    done = [i for i, error in enumerate(told["errors"]) if not error]
    pictures = [
        steps("Time to first token", [("ttft", [told["ttfts"][i] * 1e3 for i in done])], "ms"),
        steps("Time between tokens", [("itl", [gap * 1e3 for i in done for gap in told["itls"][i]])], "ms"),
        steps("Time per output token", [("tpot", [told["tpots"][i] * 1e3 for i in done if told["tpots"][i]])], "ms"),
        steps("Whole request", [("e2el", [told["e2els"][i] for i in done])], "s"),
    ]
    numbers = {name: value for name, value in told.items() if type(value) in (int, float)}
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{value:,.4g}</td></tr>" for name, value in numbers.items())
    failures = "".join(
        f"<tr><td>failed: {html.escape(kind)}</td><td>{n}</td></tr>" for kind, n in told["failures"].items()
    )
    title = f"Load on {html.escape(str(told['config']['model']))}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>The part of requests, or of gaps, that took no longer than so much.</p>{''.join(pictures)}"
        f"<h2>Numbers</h2><table>{rows}{failures}</table>"
        f"<h2>Made by</h2><pre>{html.escape(str(told.get('command', '')))}</pre></html>\n"
    )
