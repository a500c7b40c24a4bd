"""A line plot as SVG, without a library: a few lines over numbers, readable on light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 64, 46
COLOURS = (("#0b62c4", "#6cb2ff"), ("#b3450b", "#ffa068"), ("#5b6470", "#a7b0bb"))
"""Of each line, on light and on dark ground; told apart by their dashes as well."""
DASHES = ("", "7 4", "2 4")

_STYLE = """\
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 15px }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round }
"""
_DARK = "    text { fill: #e6edf3 }\n    .grid { stroke: #30363d }\n"


class Line(NamedTuple):
    """One line: what the legend calls it, and its points."""

    label: str
    points: Sequence[tuple[float, float]]


def plot(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """The whole SVG document. At most as many lines as there are colours."""
    if len(lines) > len(COLOURS):
        raise ValueError(f"{len(lines)} lines, but only {len(COLOURS)} colours")
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x_ticks, y_ticks = ticks(min(xs), max(xs), 10), ticks(min(ys), max(ys), 6)
    area = _Area(min(xs), max(xs), y_ticks[0], y_ticks[-1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_style(len(lines))}</style>",
        f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>',
        *(_y_tick(area, y) for y in y_ticks),
        *(_x_tick(area, x) for x in x_ticks if area.low_x <= x <= area.high_x),
        _centred(f'x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 8}"', x_label),
        _centred(f'transform="translate(15 {(TOP + HEIGHT - BOTTOM) / 2:g}) rotate(-90)"', y_label),
        *(_line(area, number, line) for number, line in enumerate(lines)),
        *_legend(lines),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers, about `most`, from one at or below `low` to one at or above `high`."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * one for one in (1, 2, 5, 10) if span / (power * one) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


class _Area(NamedTuple):
    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        share = (value - self.low_x) / ((self.high_x - self.low_x) or 1.0)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.low_y) / ((self.high_y - self.low_y) or 1.0)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def _centred(where: str, text: str) -> str:
    return f'<text {where} text-anchor="middle">{escape(text)}</text>'


def _style(count: int) -> str:
    light = "".join(f"  .c{i} {{ stroke: {COLOURS[i][0]} }}\n" for i in range(count))
    dark = "".join(f"    .c{i} {{ stroke: {COLOURS[i][1]} }}\n" for i in range(count))
    return f"{_STYLE}{light}  @media (prefers-color-scheme: dark) {{\n{_DARK}{dark}  }}\n"


def _y_tick(area: _Area, value: float) -> str:
    y = area.y(value)
    grid = f'<path class="grid" d="M{LEFT} {y:g}H{WIDTH - RIGHT}"/>'
    return f'{grid}<text x="{LEFT - 8}" y="{y + 4:g}" text-anchor="end">{value:g}</text>'


def _x_tick(area: _Area, value: float) -> str:
    x, bottom = area.x(value), HEIGHT - BOTTOM
    grid = f'<path class="grid" d="M{x:g} {bottom}v5"/>'
    return f'{grid}<text x="{x:g}" y="{bottom + 19}" text-anchor="middle">{value:g}</text>'


def _line(area: _Area, number: int, line: Line) -> str:
    points = " ".join(f"{area.x(x):g},{area.y(y):g}" for x, y in line.points)
    return f'<polyline {_look(number)} points="{points}"/>'


def _look(number: int) -> str:
    dash = f' stroke-dasharray="{DASHES[number]}"' if DASHES[number] else ""
    return f'class="line c{number}"{dash}'


def _legend(lines: Sequence[Line]) -> list[str]:
    parts, x = [], float(LEFT)
    for number, line in enumerate(lines):
        parts.append(f'<path {_look(number)} d="M{x:g} 44h26"/>')
        parts.append(f'<text x="{x + 33:g}" y="48">{escape(line.label)}</text>')
        x += 33 + 7.0 * len(line.label) + 22
    return parts
