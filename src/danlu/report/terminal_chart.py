"""Curves over each other in a terminal: dots of braille in colors, or letters where there is no color."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from rich.text import Text

from danlu.report.chart import ChartSeries, Point, Scale, downsample, smooth, smoothing_window, value_scale

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character, by row and column of its dots."""
_SEVERAL = "*"


@dataclass(frozen=True, kw_only=True)
class TerminalCurve:
    """One curve of a chart."""

    letter: str
    style: str
    """A color of rich."""
    points: Sequence[Point]


def draw_curves(
    curves: Sequence[TerminalCurve],
    *,
    width: int,
    height: int,
    colored: bool,
    format_value: Callable[[float], str],
    format_position: Callable[[float], str],
    log_ratio: float | None = None,
) -> Text:
    """Draw curves into `width` columns and `height` rows, axes included; empty if none has a finite point.

    All are smoothed alike, over the window that fits the longest. Without color a curve is drawn with its
    letter, and where several meet with a star.
    """
    window = smoothing_window(max(len(curve.points) for curve in curves))
    shown = [smooth([point for point in curve.points if isfinite(point[1])], window) for curve in curves]
    every = [point for points in shown for point in points]
    if not every:
        return Text()
    whole = ChartSeries(name="", title="", points=every, format_value=format_value, log_ratio=log_ratio)
    up = value_scale(whole, 1.0)
    labels = [format_value(_value(up, 1 - row / max(height - 3, 1))) for row in range(height - 2)]
    margin = max(map(len, labels))
    columns, rows = max(width - margin - 2, 10), height - 2
    first, last = min(point[0] for point in every), max(point[0] for point in every)
    across = Scale(first, max(last, first + 1), 1.0)
    grid = _Grid(columns, rows, fine=colored)
    for index, points in enumerate(shown):
        grid.draw(index, [(across(x), 1 - up(y)) for x, y in downsample(points, columns)])
    text = Text(no_wrap=True)
    for row in range(rows):
        is_labeled = row % 4 == 0 or row == rows - 1
        text.append(f"{labels[row] if is_labeled else '':>{margin}} {'┤' if is_labeled else '│'}", "dim")
        for cell, who in grid.row(row):
            curve = curves[who] if who is not None else None
            letter = _SEVERAL if cell == _SEVERAL else curve.letter if curve else " "
            text.append(cell if colored else letter, curve.style if curve and colored else "")
        text.append("\n")
    left, right = format_position(first), format_position(last)
    gap = " " * max(1, columns - len(left) - len(right))
    text.append(f"{'':>{margin}} └{'─' * columns}\n{'':>{margin}}  {left}{gap}{right}", "dim")
    return text


def _value(scale: Scale, share: float) -> float:
    """The value at a share of a scale's height."""
    if scale.log:
        return float(scale.low * (scale.high / scale.low) ** share)
    return scale.low + (scale.high - scale.low) * share


class _Grid:
    """Cells of a drawing; each has 2 × 4 dots if it is `fine`, else one."""

    def __init__(self, columns: int, rows: int, *, fine: bool) -> None:
        self.size = (columns, rows)
        self.dots = (2, 4) if fine else (1, 1)
        self.bits: dict[tuple[int, int], int] = {}
        self.owners: dict[tuple[int, int], set[int]] = {}

    def draw(self, who: int, points: Sequence[Point]) -> None:
        """Connect points, given as shares of width and height from the upper left corner."""
        wide, tall = (cells * dots - 1 for cells, dots in zip(self.size, self.dots, strict=True))
        places = [(round(x * wide), round(y * tall)) for x, y in points]
        for (x, y), (to_x, to_y) in zip(places, places[1:] or places, strict=False):
            length = max(abs(to_x - x), abs(to_y - y), 1)
            for at in range(length + 1):
                self._dot(who, x + round((to_x - x) * at / length), y + round((to_y - y) * at / length))

    def _dot(self, who: int, x: int, y: int) -> None:
        wide, tall = self.dots
        cell = (x // wide, y // tall)
        self.bits[cell] = self.bits.get(cell, 0) | _DOTS[y % tall][x % wide]
        self.owners.setdefault(cell, set()).add(who)

    def row(self, row: int) -> list[tuple[str, int | None]]:
        """A row's characters, each with the curve that gives it its color; curves that coincide take turns."""
        is_fine = self.dots != (1, 1)
        cells: list[tuple[str, int | None]] = []
        for column in range(self.size[0]):
            owners = sorted(self.owners.get((column, row), ()))
            if not owners:
                cells.append((" ", None))
            elif not is_fine and len(owners) > 1:
                cells.append((_SEVERAL, owners[0]))
            else:
                cells.append((chr(_BRAILLE + self.bits[column, row]), owners[column // 2 % len(owners)]))
        return cells
