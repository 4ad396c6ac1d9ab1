"""Scatter plots as SVG, with no library: named points, two axes, a line through those of one series or a legend."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, MARGIN = 760, 480, 70
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#7f7f7f")


@dataclass(frozen=True)
class Point:
    """A named point of a series."""

    x: float
    y: float
    name: str
    series: str


def scatter(points: Sequence[Point], title: str, x_label: str, y_label: str, joined: bool = True) -> str:
    """Return the plot as an SVG document; both axes start at zero. Raises `ValueError` without points.

    joined: the points of a series have a line through them; else a legend names the series.
    """
    if not points:
        raise ValueError("nothing to draw")
    right, top = (_ceiling(max(getattr(p, axis) for p in points)) for axis in ("x", "y"))

    def place(x: float, y: float) -> tuple[float, float]:
        return MARGIN + x / right * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - y / top * (HEIGHT - 2 * MARGIN)

    parts = [_axes(right, top, place), _text(WIDTH / 2, 30, title, 16, "middle")]
    parts.append(_text(WIDTH / 2, HEIGHT - 20, x_label, 13, "middle"))
    parts.append(f'<g transform="translate(20 {HEIGHT / 2}) rotate(-90)">{_text(0, 0, y_label, 13, "middle")}</g>')
    for n, series in enumerate(dict.fromkeys(p.series for p in points)):
        colour = COLOURS[n % len(COLOURS)]
        members = [p for p in points if p.series == series]
        if joined:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(p.x, p.y) for p in members))
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-opacity="0.4"/>')
        else:
            parts.append(f'<circle cx="{MARGIN + 16}" cy="{MARGIN + 18 * n}" r="4.5" fill="{colour}"/>')
            parts.append(_text(MARGIN + 26, MARGIN + 18 * n + 4, series, 12, "start"))
        for p in members:
            a, b = place(p.x, p.y)
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4.5" fill="{colour}"/>')
            parts.append(_text(a + 8, b - 6, p.name, 11, "start"))
    body = "\n".join(parts)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n{body}\n</svg>\n'


def _axes(right: float, top: float, place: object) -> str:
    lines = []
    for n in range(6):
        x, y = place(right * n / 5, 0)  # type: ignore[operator]
        lines.append(f'<line x1="{x}" y1="{y}" x2="{x}" y2="{MARGIN}" stroke="#ddd"/>')
        lines.append(_text(x, y + 18, f"{right * n / 5:g}", 11, "middle"))
        x, y = place(0, top * n / 5)  # type: ignore[operator]
        lines.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - MARGIN}" y2="{y}" stroke="#ddd"/>')
        lines.append(_text(x - 8, y + 4, f"{top * n / 5:g}", 11, "end"))
    return "\n".join(lines)


def _text(x: float, y: float, text: str, size: int, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _ceiling(x: float) -> float:
    """Return the least round number that is not below `x`."""
    if x <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(x))
    return next(m * power for m in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if m * power >= x)
