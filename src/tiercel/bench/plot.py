"""Pictures as SVG text, made of lines, dots and words; no library. Knows no measurement but its numbers."""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiercel.base.errors import ConfigError
from tiercel.bench.ops import OpsResult
from tiercel.bench.rows import percentile

_WIDTH, _HEIGHT = 960, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 430, 74, 50
_LEGEND_LEFT = _WIDTH - _RIGHT + 130
COLOURS = (
    "#1b6ca8",
    "#c8553d",
    "#3a7d44",
    "#8e5aa8",
    "#d99a00",
    "#17becf",
    "#d1495b",
    "#6c757d",
    "#8c6d31",
    "#e377c2",
    "#2b2d42",
    "#9acd32",
)


@dataclass(frozen=True, slots=True)
class Axes:
    """Two logarithmic axes and where they are on the picture."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point is, kept inside the picture."""
        return (
            _LEFT + _part(x, self.x) * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - _part(y, self.y) * (_HEIGHT - _TOP - _BOTTOM),
        )


def roofline(result: OpsResult) -> str:
    """Return the picture of a step's ops under the machine's limits: rate over operations a byte.

    A dot's area is its op's share of the step. A dotted line is the ceiling of the weight format that takes longest.
    """
    limits = result.limits
    read = limits.read_rate(result.step_bytes)
    shown = sorted(
        (line for line in result.lines if line.flops and line.nbytes), key=lambda line: -percentile(line.ns, 50)
    )
    dots = [(line.flops / line.nbytes, line.flops / line.one_us / 1e3) for line in shown]
    xs = [x for x, _ in dots] + [0.25, 2 * limits.int8_gop_s / read]
    ys = [y for _, y in dots] + [limits.int8_gop_s * 1.5, min(xs) * read]
    axes = Axes((min(xs) / 2, max(xs) * 2), (max(min(ys) / 2, 1e-3), max(ys) * 1.5))
    step_us = percentile(result.step_us, 50)
    parts = [
        _words(_LEFT, 24, "Roofline of one step", size=15),
        _words(
            _LEFT,
            42,
            f"{step_us:,.0f} µs on {limits.n_threads} threads; the slope is reading {read:.0f} GB/s from memory",
        ),
        *_frame(axes, "operations a byte", "GOP/s"),
        *_roofs(axes, result, read),
    ]
    total_ns = sum(percentile(line.ns, 50) for line in result.lines) or 1.0
    for i, (line, (x_value, y_value)) in enumerate(zip(shown, dots, strict=True)):
        colour = COLOURS[i % len(COLOURS)]
        share = percentile(line.ns, 50) / total_ns
        x, y = axes.at(x_value, y_value)
        radius = 3 + 20 * math.sqrt(share)
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}" stroke="{colour}"'
        parts.append(f'{dot} fill-opacity="0.45"/>')
        row = _TOP + 14 + 18 * i
        parts.append(f'<circle cx="{_LEGEND_LEFT}" cy="{row - 4}" r="5" fill="{colour}"/>')
        parts.append(_words(_LEGEND_LEFT + 44, row, f"{share:.1%}", end=True))
        parts.append(_words(_LEGEND_LEFT + 52, row, line.label))
    return svg(parts, _WIDTH, _HEIGHT)


def _roofs(axes: Axes, result: OpsResult, read: float) -> Iterator[str]:
    """Give the limits: the slope of reading, and for each kind of arithmetic a level, named at its right end."""
    limits = result.limits
    integer = [line for line in result.lines if line.is_int8 and line.ceiling_frac < 1]
    longest = max(integer, key=lambda line: percentile(line.ns, 50), default=None)
    levels = [("int8", limits.int8_gop_s, ""), ("float32", limits.f32_gflop_s, "6 4")]
    if longest is not None:
        levels.insert(1, (f"{longest.label.split()[1]} at most", limits.int8_gop_s * longest.ceiling_frac, "2 3"))
    words_y = -math.inf
    for name, level, dash in levels:
        knee = level / read
        yield _line([axes.at(axes.x[0], axes.x[0] * read), axes.at(knee, level)], "#444")
        yield _line([axes.at(knee, level), axes.at(axes.x[1], level)], "#444", dash=dash)
        x, y = axes.at(axes.x[1], level)
        words_y = max(y + 4, words_y + 13)
        yield _words(x + 6, words_y, f"{name} {level:,.0f}")


def svg(parts: Sequence[str], width: int, height: int) -> str:
    """Return a whole picture made of `parts`."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'role="img">\n<rect width="{width}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def steps(title: str, series: Sequence[tuple[str, Sequence[float]]], unit: str) -> str:
    """Return the picture of how values are distributed: for each series, the part of its values up to each value."""
    width, height, left, right, top, bottom = 460, 260, 50, 16, 36, 40
    most = max((max(values) for _, values in series if values), default=0.0) or 1.0
    parts = [_words(left, 20, title, size=14)]

    def at(value: float, frac: float) -> tuple[float, float]:
        return left + value / most * (width - left - right), height - bottom - frac * (height - top - bottom)

    for frac in (0.0, 0.5, 0.9, 1.0):
        x, y = at(0, frac)
        parts += [_line([(x, y), at(most, frac)], "#ddd"), _words(x - 6, y + 4, f"{frac:.0%}", end=True)]
    tick = _round_step(most)
    for i in range(math.floor(most / tick) + 1):
        x, y = at(i * tick, 0)
        parts.append(_words(x, y + 16, f"{i * tick:g}", middle=True))
    parts.append(_words(width - right, height - 6, unit, end=True))
    for i, (name, values) in enumerate(series):
        ordered = sorted(values)
        points = [at(ordered[0] if ordered else 0.0, 0.0)]
        for n, value in enumerate(ordered, 1):
            points += [at(value, (n - 1) / len(ordered)), at(value, n / len(ordered))]
        parts.append(_line(points, COLOURS[i % len(COLOURS)], width=2))
        if len(series) > 1:
            parts.append(_words(width - right, top + 16 * (i + 1), name, end=True, colour=COLOURS[i % len(COLOURS)]))
    return svg(parts, width, height)


def lines(title: str, series: Sequence[tuple[str, Sequence[float], Sequence[float]]], x_name: str) -> str:
    """Return the picture of values over numbers, from zero on: for each series its name, its xs and its ys."""
    width, height, left, right, top, bottom = 460, 260, 50, 16, 36, 40
    x_most = max((x for _, xs, _ in series for x in xs), default=0.0) or 1.0
    y_most = max((y for _, _, ys in series for y in ys), default=0.0) or 1.0
    parts = [_words(left, 20, title, size=14)]

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / x_most * (width - left - right), height - bottom - y / y_most * (height - top - bottom)

    for i in range(math.floor(y_most / _round_step(y_most)) + 1):
        tick = i * _round_step(y_most)
        x, y = at(0, tick)
        parts += [_line([(x, y), at(x_most, tick)], "#ddd"), _words(x - 6, y + 4, f"{tick:g}", end=True)]
    for i in range(math.floor(x_most / _round_step(x_most)) + 1):
        x, y = at(i * _round_step(x_most), 0)
        parts.append(_words(x, y + 16, f"{i * _round_step(x_most):g}", middle=True))
    parts.append(_words(width - right, height - 6, x_name, end=True))
    for i, (name, xs, ys) in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        parts.append(_line([at(x, y) for x, y in zip(xs, ys, strict=True)], colour, width=2))
        parts.append(_words(width - right, height - bottom - 14 * (len(series) - i), name, end=True, colour=colour))
    return svg(parts, width, height)


def _round_step(most: float) -> float:
    """Return 1, 2 or 5 times a power of ten, of which at most five fit below `most`."""
    power = 10.0 ** math.floor(math.log10(most / 5))
    return next(power * times for times in (1, 2, 5, 10) if power * times * 5 >= most)


def write(path: Path, text: str) -> None:
    """Write a picture or report to `path`.

    Raises: ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path.name}: {error.strerror}; need a file that can be written") from None


def _part(value: float, span: tuple[float, float]) -> float:
    part = math.log(max(value, 1e-12) / span[0]) / math.log(span[1] / span[0])
    return min(max(part, 0.0), 1.0)


def _frame(axes: Axes, x_name: str, y_name: str) -> Iterator[str]:
    left, bottom = axes.at(axes.x[0], axes.y[0])
    right, top = axes.at(axes.x[1], axes.y[1])
    yield _line([(left, top), (left, bottom), (right, bottom)], "#000")
    for power in range(math.ceil(math.log10(axes.x[0])), math.floor(math.log10(axes.x[1])) + 1):
        x, _ = axes.at(10.0**power, axes.y[0])
        yield _line([(x, top), (x, bottom)], "#eee")
        yield _words(x, bottom + 16, f"{10.0**power:g}", middle=True)
    for power in range(math.ceil(math.log10(axes.y[0])), math.floor(math.log10(axes.y[1])) + 1):
        _, y = axes.at(axes.x[0], 10.0**power)
        yield _line([(left, y), (right, y)], "#eee")
        yield _words(left - 6, y + 4, f"{10.0**power:g}", end=True)
    yield _words((left + right) / 2, bottom + 36, x_name, middle=True)
    yield _words(left, top - 8, y_name)


def _line(points: Sequence[tuple[float, float]], colour: str, *, dash: str = "", width: float = 1) -> str:
    told = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{told}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def _words(
    x: float, y: float, text: str, *, size: int = 11, end: bool = False, middle: bool = False, colour: str = "#222"
) -> str:
    anchor = "end" if end else "middle" if middle else "start"
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
        f"{html.escape(text)}</text>"
    )
