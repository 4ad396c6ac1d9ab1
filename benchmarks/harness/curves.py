"""Curves with bands as SVG, with no library: y over x for several series, axes that fit them."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 500, 70, 210, 45, 55
COLOURS = ("#333333", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
Place = Callable[[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """y over x, and how far above and below it a band reaches."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    band: Sequence[float]


def draw(curves: Sequence[Curve], title: str, x_label: str, y_label: str, skip: float = 0.1) -> str:
    """Return the picture as an SVG document. The first `skip` of the range of x does not decide the range of y.

    Raises `ValueError` without points.
    """
    points = [(x, y) for c in curves for x, y in zip(c.x, c.y, strict=True)]
    if not points:
        raise ValueError("nothing to draw")
    right = max(x for x, _ in points) or 1.0
    seen = [y for x, y in points if x >= skip * right] or [y for _, y in points]
    low, high = min(seen), max(seen)
    margin = 0.05 * (high - low) or 0.5
    low, high = low - margin, high + margin

    def place(x: float, y: float) -> tuple[float, float]:
        inside = min(max(y, low), high)
        across = (WIDTH - LEFT - RIGHT) * x / right
        return LEFT + across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (inside - low) / (high - low)

    parts = [*_axes(right, low, high, place), _text(LEFT, 28, title, 15, "start")]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 15, x_label, 13, "middle"))
    parts.append(f'<g transform="translate(18 {HEIGHT / 2}) rotate(-90)">{_text(0, 0, y_label, 13, "middle")}</g>')
    for n, curve in enumerate(curves):
        parts += _curve(curve, COLOURS[n % len(COLOURS)], n, place)
    body = "\n".join(parts)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n{body}\n</svg>\n'


def _curve(curve: Curve, colour: str, n: int, place: Place) -> list[str]:
    above = [place(x, y + b) for x, y, b in zip(curve.x, curve.y, curve.band, strict=True)]
    below = [place(x, y - b) for x, y, b in zip(curve.x, curve.y, curve.band, strict=True)]
    line = [place(x, y) for x, y in zip(curve.x, curve.y, strict=True)]
    top = TOP + 20 + 22 * n
    return [
        f'<polygon points="{_path([*above, *reversed(below)])}" fill="{colour}" fill-opacity="0.12"/>',
        f'<polyline points="{_path(line)}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
        f'<rect x="{WIDTH - RIGHT + 15}" y="{top - 9}" width="14" height="4" fill="{colour}"/>',
        _text(WIDTH - RIGHT + 36, top - 3, curve.name, 12, "start"),
    ]


def _axes(right: float, low: float, high: float, place: Place) -> list[str]:
    lines = []
    for n in range(6):
        x, y = right * n / 5, low + (high - low) * n / 5
        (a, b), (c, _) = place(x, low), place(right, low)
        lines.append(f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{a:.1f}" y2="{TOP}" stroke="#eee"/>')
        lines.append(_text(a, b + 18, f"{x:.4g}", 11, "middle"))
        a, b = place(0, y)
        lines.append(f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{b:.1f}" stroke="#eee"/>')
        lines.append(_text(a - 8, b + 4, f"{y:.4g}", 11, "end"))
    return lines


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _text(x: float, y: float, text: str, size: int, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{html.escape(text)}</text>'
