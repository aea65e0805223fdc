"""Line plots as SVG text, without a plotting library: for the reports of commands and benchmarks."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, BELOW, LEGEND = 640, 320, 64, 32, 44, 150
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
MOST = 14  # names beside the plot


class Line(NamedTuple):
    """A line of a plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def write_plot(path: Path, title: str, lines: Sequence[Line], *, x: str = "", log: bool = False) -> Path:
    """Write a plot to a file, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plot(title, lines, x=x, log=log))
    return path


def plot(title: str, lines: Sequence[Line], *, x: str = "", log: bool = False) -> str:
    """A plot as SVG, with logarithmic axes if `log`.

    >>> plot("speed", [Line("a", [0, 1], [1, 2])]).startswith("<svg")
    True
    """
    points = [pair for line in lines for pair in zip(line.x, line.y, strict=True) if _fits(pair, log)]
    xs, ys = ([pair[axis] for pair in points] or [1.0] for axis in (0, 1))
    across = _Axis(min(xs), max(xs), LEFT, WIDTH - LEGEND, log)
    up = _Axis(min([*ys, *([] if log else [0.0])]), max(ys), HEIGHT - BELOW, TOP, log)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13" font-weight="bold">{escape(title)}</text>',
    ]
    for value in across.ticks():
        place = across(value)
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BELOW}" stroke="#ddd"/>')
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - BELOW + 14}" text-anchor="middle">{_short(value)}</text>')
    for value in up.ticks():
        place = up(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - LEGEND}" y1="{place:.1f}" y2="{place:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - LEGEND) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>')
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        drawn = [pair for pair in zip(line.x, line.y, strict=True) if _fits(pair, log)]
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in drawn)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(drawn) <= MOST:
            parts += [f'<circle cx="{across(a):.1f}" cy="{up(b):.1f}" r="2.5" fill="{colour}"/>' for a, b in drawn]
        if number < MOST:
            place = TOP + 10 + 16 * number
            name = escape(line.name if len(line.name) < 22 else f"{line.name[:20]}…")
            parts.append(f'<text x="{WIDTH - LEGEND + 10}" y="{place}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


class _Axis:
    def __init__(self, low: float, high: float, start: float, stop: float, log: bool) -> None:
        self._log = log
        if low == high:
            low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
        self.low, self.high = low, high
        self._start, self._stop = start, stop

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) if self._log else v for v in (self.low, self.high, value))
        return self._start + (at - low) / (high - low) * (self._stop - self._start)

    def ticks(self) -> list[float]:
        if self._log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**power for power in powers] if len(powers) > 1 else [self.low, self.high]
        step = 10 ** math.floor(math.log10(self.high - self.low))
        step = next(s for s in (step / 5, step / 2, step, 2 * step) if (self.high - self.low) / s <= 6 or s > step)
        return [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def _fits(pair: tuple[float, float], log: bool) -> bool:
    return all(math.isfinite(value) and (value > 0 or not log) for value in pair)


def _short(value: float) -> str:
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
