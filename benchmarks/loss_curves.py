"""Curves over the steps of a run: thinned for a report, and drawn."""

from collections.abc import Mapping
from math import log

POINTS = 100
"""Points of a curve in the report, each the mean of as many steps as make that many."""
TICKS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
WIDTH, PANEL, LEFT, RIGHT, TOP, BOTTOM = 760, 250, 50, 110, 28, 40
Curves = Mapping[str, list[float]]


def mean(values: list[float]) -> float:
    """The mean of losses."""
    return sum(values) / len(values)


def thinned(values: list[float]) -> list[float]:
    """Means of consecutive steps, at most `POINTS` of them."""
    each = -(-len(values) // POINTS)
    return [round(mean(values[at : at + each]), 5) for at in range(0, len(values), each)]


def draw(panels: Mapping[str, Curves], steps: int, colors: dict[str, str]) -> str:
    """Curves by the title of their panel, below one another, as a picture: an SVG with logarithmic heights."""
    height = len(panels) * PANEL + BOTTOM
    parts = [f'<rect width="{WIDTH}" height="{height}" fill="white"/>']
    for number, (title, curves) in enumerate(panels.items()):
        parts += _panel(title, curves, colors, number * PANEL)
    for row, name in enumerate(next(iter(panels.values()))):
        at = WIDTH - RIGHT + 12, TOP + 12 + 18 * row
        parts.append(f'<text x="{at[0]}" y="{at[1]}" fill="{colors[name]}">{name}</text>')
    for quarter in range(5):
        at = _x(quarter, 5), height - 22
        parts.append(f'<text x="{at[0]:.1f}" y="{at[1]}" text-anchor="middle">{steps * quarter // 4:,}</text>')
    parts.append(f'<text x="{_x(2, 5):.1f}" y="{height - 5}" text-anchor="middle">step</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{" and ".join(panels)} over {steps:,} steps">{"".join(parts)}</svg>\n'
    )


def _x(index: int, points: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * index / max(1, points - 1)


def _panel(title: str, curves: Curves, colors: dict[str, str], top: float) -> list[str]:
    low, high = (pick(value for curve in curves.values() for value in curve) for pick in (min, max))

    def y(value: float) -> float:
        share = log(high / value) / log(high / low) if high > low else 0.5
        return top + TOP + (PANEL - TOP - 10) * share

    parts = [f'<text x="{LEFT}" y="{top + 16}" font-weight="bold">{title}</text>']
    for tick in TICKS:
        if low <= tick <= high:
            parts.append(f'<path d="M{LEFT},{y(tick):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for name, curve in curves.items():
        path = " ".join(f"{_x(index, len(curve)):.1f},{y(value):.1f}" for index, value in enumerate(curve))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colors[name]}" stroke-width="1.5"/>')
    return parts
